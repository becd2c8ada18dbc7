"""REINFORCE++ (arXiv 2501.03262) in its group-baseline form: centred in the group, scaled by the whole iteration.

    A_i = (r_i - mean of its group) / (std over all centred rewards of the iteration + eps)

Every response counts once in the scale, however long it is; OpenRLHF and verl whiten over tokens, where longer ones
count more.

The scale is a statistic of the batch: it is known only when every group is in. So this objective waits for all groups
(`schedule.mode = "sync"`) and is refused in `periodic`. The token loss is GRPO's.
"""

import torch


def batch_scale(rewards_by_group: list[torch.Tensor], eps: float = 1e-8) -> float:
    """The iteration's standard deviation of centred rewards, from the rewards [G] of every group."""
    centred = torch.cat([rewards - rewards.mean() for rewards in rewards_by_group])
    return centred.square().mean().sqrt().item() + eps


def reinforce_pp_advantages(rewards: torch.Tensor, scale: float) -> torch.Tensor:
    """[G] -> [G]."""
    return (rewards - rewards.mean()) / scale
