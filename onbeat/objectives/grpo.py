"""GRPO: advantages within the group and the clipped surrogate of DeepSeekMath (arXiv 2402.03300), 4.1.2 and eq. 3.

    A_i = (r_i - mean(r)) / (std(r) + eps),             r: the rewards of a group, std: the sample standard deviation
    L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),        rho = exp(trainer_logprobs - old_logprobs)

With one optimizer step per iteration the old policy *is* the policy: old_logprobs = trainer_logprobs.detach(), rho = 1,
and the gradient is that of -A * trainer_logprobs.
"""

from typing import Literal

from pydantic import Field

from onbeat.contracts.section import Float
from onbeat.objectives.base import LossInputs, PolicyObjective, Tensor, TokenLoss

EPS = 1e-4


class GrpoObjective(PolicyObjective):
    """DeepSeekMath (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    clip_low: Float = Field(0.2, gt=0, lt=1, description="importance ratios below 1 - clip_low are clipped")
    clip_high: Float = Field(0.2, gt=0, description="importance ratios above 1 + clip_high are clipped")

    def advantages(self, rewards: Tensor) -> Tensor:
        return (rewards - rewards.mean()) / (rewards.std() + EPS)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return self.clipped_surrogate(inputs.importance_ratio, inputs.advantages)

    def clipped_surrogate(self, ratio: Tensor, advantages: Tensor) -> TokenLoss:
        """Return the loss [N] for a ratio [N] and advantages [N], and whether the clip cut the token's gradient off."""
        surrogate = ratio * advantages
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        return -surrogate.minimum(clipped), clipped < surrogate
