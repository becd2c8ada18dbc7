"""From groups on the stream to one packed micro-batch of tensors."""

from dataclasses import dataclass

import torch

from onbeat.config import JobConfig, OnlineDpoObjective
from onbeat.streams.codec import RolloutGroup
from services.trainer.attention import PackedLayout, build_layout


@dataclass(frozen=True)
class MicroBatch:
    """Whole groups in one row: T places, N response tokens, R responses."""

    token_ids: torch.Tensor  # [T] int64, the inputs
    layout: PackedLayout
    target_ids: torch.Tensor  # [N] int64, the response tokens
    rollout_logprobs: torch.Tensor  # [N] float32
    rewards: torch.Tensor  # [R] float32
    response_lengths: torch.Tensor  # [R] int64, tokens
    group_sizes: list[int]  # responses of each group; they sum to R
    group_ids: list[str]

    def response_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [R]."""
        index = torch.arange(len(self.response_lengths), device=values.device).repeat_interleave(self.response_lengths)
        return torch.zeros(len(self.response_lengths), device=values.device).index_add(0, index, values)


def pack(groups: list[RolloutGroup], device: torch.device) -> MicroBatch:
    """Shapes as in MicroBatch; groups and responses keep their order."""
    inputs: list[int] = []
    for group in groups:
        inputs += group.prompt_token_ids
        for response in group.responses:
            inputs += response.token_ids[:-1]
    responses = [response for group in groups for response in group.responses]
    targets = [token for response in responses for token in response.token_ids]
    rollout_logprobs = [logprob for response in responses for logprob in response.rollout_logprobs]
    shape = [(len(group.prompt_token_ids), [len(r.token_ids) for r in group.responses]) for group in groups]
    return MicroBatch(
        token_ids=torch.tensor(inputs, device=device),
        layout=build_layout(shape, device),
        target_ids=torch.tensor(targets, device=device),
        rollout_logprobs=torch.tensor(rollout_logprobs, dtype=torch.float32, device=device),
        rewards=torch.tensor([r.reward for r in responses], dtype=torch.float32, device=device),
        response_lengths=torch.tensor([len(r.token_ids) for r in responses], device=device),
        group_sizes=[len(group.responses) for group in groups],
        group_ids=[group.group_id for group in groups],
    )


def is_informative(group: RolloutGroup, config: JobConfig) -> bool:
    """Whether the group has any gradient: equal rewards give zero advantages (or no pair), unless a KL term pulls."""
    rewards = {response.reward for response in group.responses}
    has_kl = config.objective.kl.coef > 0 and not isinstance(config.objective, OnlineDpoObjective)
    return len(rewards) > 1 or (has_kl and bool(rewards))


def num_places(group: RolloutGroup) -> int:
    """Places of the packed row that the group takes."""
    return len(group.prompt_token_ids) + sum(len(response.token_ids) - 1 for response in group.responses)
