"""GSPO: one importance ratio per response (arXiv 2507.18071), eq. 5 and 7, in its token form (eq. 13).

    s = exp(mean over the response's tokens of (trainer_logprobs - old_logprobs))
    L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A),        A is GRPO's

The token form keeps the value s and lets the gradient flow through each token: s_t = sg(s) exp(logp_t - sg(logp_t)).
The clip acts on whole responses. Usual bounds are of the order of 1e-4, far smaller than GRPO's.
"""

from typing import Literal

from pydantic import Field

from onbeat.contracts.section import Float
from onbeat.objectives.base import LossInputs, Normalization, TokenLoss, ratio_of
from onbeat.objectives.grpo import GrpoObjective


class GspoObjective(GrpoObjective):
    """arXiv 2507.18071: one ratio per response."""

    type: Literal["gspo"]  # type: ignore[assignment]
    clip_low: Float = Field(3e-4, gt=0, lt=1, description="importance ratios below 1 - clip_low are clipped")
    clip_high: Float = Field(4e-4, gt=0, description="importance ratios above 1 + clip_high are clipped")
    normalization: Normalization = "sequence_mean"

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        logprobs = inputs.trainer_logprobs
        response_log_ratio = inputs.response_mean(logprobs.detach() - inputs.old_logprobs)
        token_ratio = ratio_of(response_log_ratio + (logprobs - logprobs.detach()))
        return self.clipped_surrogate(token_ratio, inputs.advantages)
