"""Corrections for tokens that another distribution sampled: other kernels (engine mismatch), or older weights.

With r = exp(old_logprobs - rollout_logprobs):

    truncated (TIS):  weight min(r, cap); every token stays
    band (IcePop):    weight r inside [low, high], 0 outside; rejected tokens leave the denominator too
"""

from typing import Literal

from pydantic import Field

from onbeat.contracts.section import Float, Section
from onbeat.objectives.base.inputs import Tensor, ratio_of


class TruncatedImportance(Section):
    """Weight min(r, cap) on each token, r = trainer / rollout probability."""

    type: Literal["truncated"] = "truncated"
    cap: Float = Field(2.0, gt=0, description="largest weight of a token")

    def weights(self, old_logprobs: Tensor, rollout_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N] weights without gradient and the mask of kept tokens (bool): all."""
        import torch

        weights = ratio_of((old_logprobs - rollout_logprobs).detach()).clamp(max=self.cap)
        return weights, torch.ones_like(weights, dtype=torch.bool)


class BandImportance(Section):
    """Weight r inside the band; tokens outside leave loss and denominator (IcePop)."""

    type: Literal["band"] = "band"
    low: Float = Field(0.5, gt=0, le=1, description="smallest weight that stays")
    high: Float = Field(5.0, ge=1, description="largest weight that stays")

    def weights(self, old_logprobs: Tensor, rollout_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return [N] weights without gradient and the mask of kept tokens (bool)."""
        ratio = ratio_of((old_logprobs - rollout_logprobs).detach())
        is_kept = (ratio >= self.low) & (ratio <= self.high)
        return ratio * is_kept, is_kept
