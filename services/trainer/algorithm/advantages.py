"""Advantages from rewards, within one group only: independent of every other group and of arrival order."""

import torch


def grpo_advantages(rewards: torch.Tensor, eps: float = 1e-4) -> torch.Tensor:
    """A_i = (r_i - mean(r)) / (std(r) + eps), DeepSeekMath (arXiv 2402.03300), section 4.1.2.

    rewards: [G] float32, G >= 2; std is the sample standard deviation. A group whose rewards are all equal gets exact
    zeros: it teaches nothing.
    """
    centred = rewards - rewards.mean()
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return centred / (rewards.std() + eps)
