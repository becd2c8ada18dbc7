"""CISPO: clip the importance weight, not the update (MiniMax-M1, arXiv 2506.13585), eq. 4 and 5.

    L = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A trainer_logprobs,        A and rho are GRPO's

No token loses its gradient; far off-policy ones only weigh less. The paper leaves the lower bound open (clip_low = 1).
"""

from typing import Literal

from pydantic import Field

from onbeat.contracts.section import Float
from onbeat.objectives.base import LossInputs, TokenLoss
from onbeat.objectives.grpo import GrpoObjective


class CispoObjective(GrpoObjective):
    """arXiv 2506.13585: clipped weights instead of clipped updates."""

    type: Literal["cispo"]  # type: ignore[assignment]
    clip_low: Float = Field(1.0, gt=0, le=1, description="weights below 1 - clip_low are clipped")
    clip_high: Float = Field(4.0, gt=0, description="weights above 1 + clip_high are clipped")

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        """Return the loss of each token [N], and whether its weight was clipped."""
        ratio = inputs.importance_ratio.detach()
        weight = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return -weight * inputs.advantages * inputs.trainer_logprobs, weight != ratio
