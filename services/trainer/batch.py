"""From groups on the stream to one packed micro-batch of tensors."""

from dataclasses import dataclass

import torch

from onbeat.config import JobConfig
from onbeat.streams.codec import RolloutGroup
from services.trainer.algorithm.advantages import grpo_advantages
from services.trainer.algorithm.normalization import token_weights
from services.trainer.attention import PackedLayout, build_layout


@dataclass(frozen=True)
class MicroBatch:
    """Whole groups in one row: T places, N response tokens, R responses."""

    token_ids: torch.Tensor  # [T] int64, the inputs
    layout: PackedLayout
    target_ids: torch.Tensor  # [N] int64, the response tokens
    rollout_logprobs: torch.Tensor  # [N] float32
    advantages: torch.Tensor  # [N] float32, the response's advantage at each of its tokens
    token_weights: torch.Tensor  # [N] float32, of the loss normalisation
    group_ids: list[str]


def is_informative(group: RolloutGroup, config: JobConfig) -> bool:
    """Whether the group has any gradient: equal rewards give zero advantages, and without KL nothing else pulls."""
    rewards = {response.reward for response in group.responses}
    return len(rewards) > 1 or (config.objective.kl.coef > 0 and bool(rewards))


def pack(groups: list[RolloutGroup], config: JobConfig, device: torch.device) -> MicroBatch:
    """Shapes as in MicroBatch; groups keep their order."""
    inputs: list[int] = []
    targets: list[int] = []
    rollout_logprobs: list[float] = []
    advantages, lengths = [], []
    for group in groups:
        inputs += group.prompt_token_ids
        rewards = torch.tensor([response.reward for response in group.responses], dtype=torch.float32)
        advantages.append(grpo_advantages(rewards))
        for response in group.responses:
            inputs += response.token_ids[:-1]
            targets += response.token_ids
            rollout_logprobs += response.rollout_logprobs
            lengths.append(len(response.token_ids))
    shape = [(len(group.prompt_token_ids), [len(r.token_ids) for r in group.responses]) for group in groups]
    lengths_R = torch.tensor(lengths)
    return MicroBatch(
        token_ids=torch.tensor(inputs, device=device),
        layout=build_layout(shape, device),
        target_ids=torch.tensor(targets, device=device),
        rollout_logprobs=torch.tensor(rollout_logprobs, dtype=torch.float32, device=device),
        advantages=torch.cat(advantages).repeat_interleave(lengths_R).to(device),
        token_weights=token_weights(config.objective.normalization, lengths_R).to(device),
        group_ids=[group.group_id for group in groups],
    )


def num_places(group: RolloutGroup) -> int:
    """Places of the packed row that the group takes."""
    return len(group.prompt_token_ids) + sum(len(response.token_ids) - 1 for response in group.responses)
