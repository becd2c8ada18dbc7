"""Per-token estimators of KL(policy || reference) from the sampled token (Schulman, "Approximating KL divergence").

With r = ref - policy (log ratio): k1 = -r, unbiased but noisy; k2 = r^2 / 2, low variance; k3 = exp(r) - 1 - r,
unbiased and never negative.

As a term of the loss only its gradient counts. Expected over the policy's own samples, k2 has that of KL(policy ||
reference), k3 that of KL(reference || policy), and k1 none: as a reward it is right, in the loss it is refused.
"""

from typing import Literal

from pydantic import Field, model_validator

from onbeat.objectives.base.inputs import Tensor, ratio_of
from onbeat.section import Float, Section

Estimator = Literal["k1", "k2", "k3"]


class KlConfig(Section):
    coef: Float = Field(0.0, ge=0, description="factor of the divergence; 0 skips the reference model altogether")
    estimator: Estimator = Field(
        "k3",
        description="estimator of the divergence from sampled tokens; k1 only in the reward: its expected gradient in "
        "the loss is 0",
    )
    placement: Literal["loss", "reward"] = Field(
        "loss", description="place of the divergence: in the token loss, or subtracted from rewards before advantages"
    )

    @model_validator(mode="after")
    def check_estimator(self) -> "KlConfig":
        if self.coef > 0 and (self.estimator, self.placement) == ("k1", "loss"):
            raise ValueError(
                "kl.estimator: k1 in the loss pulls nowhere, since its expected gradient is 0; use k2 or k3, or "
                "placement = 'reward'"
            )
        return self


def kl_estimate(estimator: Estimator, trainer_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimate the KL of each token, [N] -> [N], in nats."""
    log_ratio = ref_logprobs - trainer_logprobs
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio.square()
        case "k3":
            return ratio_of(log_ratio) - 1.0 - log_ratio
