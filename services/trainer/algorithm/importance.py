"""Correcting for tokens that another distribution sampled: other kernels (engine mismatch), or older weights.

With r = exp(old_logprobs - rollout_logprobs):

    truncated (TIS):  weight min(r, cap); every token stays
    band (IcePop):    weight r inside [low, high], 0 outside; rejected tokens leave the denominator too
"""

import torch

from services.trainer.algorithm.inputs import ratio_of


def truncated_weights(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float) -> torch.Tensor:
    """[N] weights without gradient, at most `cap`."""
    return ratio_of((old_logprobs - rollout_logprobs).detach()).clamp(max=cap)


def band_weights(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] weights without gradient and the mask of kept tokens (bool)."""
    ratio = ratio_of((old_logprobs - rollout_logprobs).detach())
    is_kept = (ratio >= low) & (ratio <= high)
    return ratio * is_kept, is_kept
