"""The step from groups on the stream to one packed micro-batch of tensors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from onbeat.config import JobConfig
from onbeat.objectives.base import Responses
from onbeat.streams.codec import Response, RolloutGroup, do_rewards_differ, is_truncated
from onbeat.streams.signal import Signal
from services.trainer.attention import PackedLayout, Tree, build_layout
from services.trainer.episode import lay_out, num_response_places

MIN_PREFIX = 16  # tokens; a shorter prefix is not worth the one or two more calls that every kernel makes for it


@dataclass(frozen=True)
class Part:
    """The responses of a group that go into one row: all, unless the group is larger than a micro-batch."""

    group: RolloutGroup
    members: tuple[int, ...]  # indices of responses, ascending

    @classmethod
    def whole(cls, group: RolloutGroup) -> "Part":
        return cls(group, tuple(range(len(group.responses))))


@dataclass(frozen=True)
class MicroBatch(Responses):
    """The parts of groups in one row: T places, N response tokens, R responses."""

    token_ids: torch.Tensor  # [T] int64, the inputs, with the tokens that episodes observed
    layout: PackedLayout
    target_ids: torch.Tensor  # [N] int64, the response tokens: those that the policy sampled
    group_ids: list[str]
    for_teacher: "MicroBatch | None" = None  # the same responses after the teacher's own prompts, if it has those


def pack(
    groups: Sequence[RolloutGroup | Part],
    device: torch.device,
    is_prefix_shared: bool = True,
    config: JobConfig | None = None,
) -> MicroBatch:
    """Pack groups into one MicroBatch; groups and responses keep their order. Their common prefix is packed once.

    `config`: of the job, whose objective says what responses are compared by; None: by their rewards.
    """
    parts = [group if isinstance(group, Part) else Part.whole(group) for group in groups]
    responses = [part.group.responses[member] for part in parts for member in part.members]
    prompts = [list(part.group.prompt_token_ids) for part in parts]
    laid_out = [
        [lay_out(part.group.responses[member], len(part.group.prompt_token_ids)) for member in part.members]
        for part in parts
    ]
    token_ids, layout = lay_out_row(prompts, laid_out, is_prefix_shared, device)
    targets = [token for response in responses for token in response.token_ids]
    rollout_logprobs = [logprob for response in responses for logprob in response.rollout_logprobs]
    batch = MicroBatch(
        token_ids=token_ids,
        layout=layout,
        target_ids=torch.tensor(targets, device=device),
        rollout_logprobs=torch.tensor(rollout_logprobs, dtype=torch.float32, device=device),
        response_lengths=torch.tensor([len(response.token_ids) for response in responses], device=device),
        group_rewards=[
            group_rewards(part.group, device) if config is None else compared(part.group, config, device)
            for part in parts
        ],
        members=[torch.tensor(part.members, device=device) for part in parts],
        group_ids=[part.group.group_id for part in parts],
    )
    prompts = [list(part.group.teacher_prompt_token_ids) for part in parts]
    if not any(prompts):
        return batch
    token_ids, layout = lay_out_row(prompts, laid_out, is_prefix_shared, device)
    return replace(batch, for_teacher=replace(batch, token_ids=token_ids, layout=layout))


def lay_out_row(
    prompts: Sequence[list[int]],
    laid_out: Sequence[Sequence[tuple[list[int], Tree]]],
    is_prefix_shared: bool,
    device: torch.device,
) -> tuple[torch.Tensor, PackedLayout]:
    """Return the input tokens [T] of prompts, each with the responses behind it as `lay_out` gives them, and their
    places."""
    prefix = common_prefix(prompts) if is_prefix_shared else []
    inputs = [*prefix]
    for prompt, responses in zip(prompts, laid_out, strict=True):
        inputs += prompt[len(prefix) :]
        for tokens, _ in responses:
            inputs += tokens
    shape = [
        (len(prompt), [tree for _, tree in responses]) for prompt, responses in zip(prompts, laid_out, strict=True)
    ]
    return torch.tensor(inputs, device=device), build_layout(shape, device, len(prefix))


def common_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """Return the prefix that several prompts share, or [] if it is shorter than MIN_PREFIX.

    It never has the last token of a prompt, because that token predicts the responses.

    >>> common_prefix([[*range(20), 7], [*range(20), 8, 9]]) == list(range(20))
    True
    """
    if len(prompts) < 2:
        return []
    lowest, highest = min(prompts), max(prompts)  # lexicographically: what both begin with, all begin with
    longest = min(map(len, prompts)) - 1
    length = next((place for place in range(longest) if lowest[place] != highest[place]), longest)
    return lowest[:length] if length >= MIN_PREFIX else []


def group_rewards(group: RolloutGroup, device: torch.device | None = None) -> torch.Tensor:
    """Return the rewards of all responses, [G] float32; NaN for one without."""
    rewards = [math.nan if response.has_no_reward else response.reward for response in group.responses]
    return torch.tensor(rewards, dtype=torch.float32, device=device)


def compared(group: RolloutGroup, config: JobConfig, device: torch.device | None = None) -> torch.Tensor:
    """Return what the objective compares the responses by, [G] float32: their rewards, or a function of their parts.
    In a group without the job's signal all are equal, so that its advantages are exactly 0."""
    rewards = group_rewards(group, device)
    rewards_here = config.rewards_by_source.get(group.source, config.rewards)
    summed = [reward for reward in rewards_here if reward.part is not None]
    parts = [
        [response.reward_parts.get(reward.part or "", math.nan) for response in group.responses] for reward in summed
    ]
    parts_KG = torch.tensor(parts, dtype=torch.float32, device=device)
    weights = torch.tensor([reward.weight for reward in summed], dtype=torch.float32, device=device)
    if not Signal.of(config).is_in(group):
        parts_KG = torch.zeros_like(parts_KG)
        rewards = rewards.where(rewards.isnan(), 0.0) if do_rewards_differ(group) else rewards
    return config.objective.compared(rewards, parts_KG, weights)


def rows(groups: Sequence[RolloutGroup], config: JobConfig) -> list[list[Part]]:
    """Distribute groups over rows under the token budget, in order: each inner list is packed into one row.

    A group larger than the budget is split, and each part repeats the prompt. A preference pair or a KL term in the
    reward ties responses together: such a group is never split, and may exceed the budget.
    """
    parts = (part for group in groups for part in parts_of(group, config))
    return fill_rows(parts, config.training.row_tokens)


def fill_rows(parts: Iterable[Part], budget: int) -> list[list[Part]]:
    """Distribute parts over rows of at most `budget` places, in order; a larger part is a row by itself."""
    packed: list[list[Part]] = []
    room = 0
    for part in parts:
        places = num_places(part.group, part.members)
        if not packed or places > room:
            packed.append([])
            room = budget
        packed[-1].append(part)
        room -= places
    return packed


def parts_of(group: RolloutGroup, config: JobConfig) -> list[Part]:
    """Split the group's trained responses into as few parts as fit the budget, with at least one response each."""
    members = trained_members(group, config) or tuple(range(len(group.responses)))  # all masked: to be measured only
    if config.objective.needs_whole_group:
        return [Part(group, members)]
    parts: list[tuple[int, ...]] = []
    for member in members:
        longer = (*parts[-1], member) if parts else (member,)
        if parts and num_places(group, longer) <= config.training.row_tokens:
            parts[-1] = longer
        else:
            parts.append((member,))
    return [Part(group, part) for part in parts]


def idle_batch(device: torch.device) -> MicroBatch:
    """Return a batch of one prompt token and one response token: the cheapest pass."""
    response = Response(token_ids=[0], rollout_logprobs=[0.0])
    return pack([RolloutGroup(group_id="idle", prompt_token_ids=[0], responses=[response])], device)


def does_count(group: RolloutGroup, config: JobConfig) -> bool:
    """Return whether the group is one of those that the update is divided by: not if it was to be replaced."""
    return config.rollout.max_prompts_per_iteration is None or Signal.of(config).is_in(group)


def is_masked(response: Response, config: JobConfig) -> bool:
    """Return whether the response was cut and is therefore not trained; its group is compared with its reward."""
    return config.rollout.truncated == "mask" and is_truncated(response)


def counted_responses(group: RolloutGroup, config: JobConfig) -> list[Response]:
    """Return the responses that the update is divided by."""
    if not does_count(group, config):
        return []
    is_needed = config.objective.needs_reward
    return [
        response
        for response in group.responses
        if not (is_needed and response.has_no_reward) and not is_masked(response, config)
    ]


def trained_members(group: RolloutGroup, config: JobConfig) -> tuple[int, ...]:
    """Return the responses that a pass is for, ascending."""
    members = config.objective.trained_members(compared(group, config))
    return tuple(member for member in members if not is_masked(group.responses[member], config))


def is_trained(group: RolloutGroup, config: JobConfig) -> bool:
    """Return whether the group can change the update, so that it is passed through the model."""
    has_counted = bool(counted_responses(group, config))
    return has_counted and (config.teacher is not None or config.objective.has_signal(compared(group, config)))


def cost(group: RolloutGroup, config: JobConfig) -> int:
    """Return the maximum number of packed-row places that training the group takes; 0 if it has no signal."""
    if not is_trained(group, config):
        return 0
    return num_places(group, trained_members(group, config))


def num_places(group: RolloutGroup, members: Sequence[int] | None = None) -> int:
    """Count the places of the packed row for the prompt and those responses (default: all) without a shared prefix. Of
    two prompts, the policy's and the teacher's, the longer one counts."""
    members = range(len(group.responses)) if members is None else members
    num_prompt = len(group.prompt_token_ids)
    return max(num_prompt, len(group.teacher_prompt_token_ids)) + sum(
        num_response_places(group.responses[member], num_prompt) for member in members
    )
