"""GRPO: the clipped surrogate of DeepSeekMath (arXiv 2402.03300), eq. 3, per token.

    L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),   rho = exp(trainer_logprobs - old_logprobs)

With one optimizer step per iteration the old policy *is* the policy: old_logprobs = trainer_logprobs.detach(), rho = 1,
and the gradient is that of -A * trainer_logprobs.
"""

import torch


def grpo_token_loss(
    trainer_logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All [N]. Returns the loss per token and whether the clip cut its gradient off (bool)."""
    assert trainer_logprobs.shape == old_logprobs.shape == advantages.shape
    importance_ratio = (trainer_logprobs - old_logprobs).exp()
    clipped_ratio = importance_ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    surrogate, clipped = importance_ratio * advantages, clipped_ratio * advantages
    return -torch.minimum(surrogate, clipped), clipped < surrogate
