"""GRPO: the clipped surrogate of DeepSeekMath (arXiv 2402.03300), eq. 3, per token.

    L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),   rho = exp(trainer_logprobs - old_logprobs)

With one optimizer step per iteration the old policy *is* the policy: old_logprobs = trainer_logprobs.detach(), rho = 1,
and the gradient is that of -A * trainer_logprobs.
"""

import torch

from services.trainer.algorithm.inputs import LossInputs


def grpo_token_loss(inputs: LossInputs, clip_low: float, clip_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] and whether the clip cut the token's gradient off (bool)."""
    surrogate = inputs.importance_ratio * inputs.advantages
    clipped = inputs.importance_ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * inputs.advantages
    return -torch.minimum(surrogate, clipped), clipped < surrogate
