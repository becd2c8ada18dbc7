"""Per-token estimators of KL(policy || reference) from the sampled token (Schulman, "Approximating KL divergence").

With r = ref - policy (log ratio): k1 = -r, unbiased but noisy; k2 = r^2 / 2, low variance; k3 = exp(r) - 1 - r,
unbiased and never negative.

As a term of the loss only its gradient counts. Expected over the policy's own samples, k2 has that of KL(policy ||
reference), k3 that of KL(reference || policy), and k1 none. As a reward only the estimate counts, which multiplies the
gradient of the token's logprob. Then k1 has the gradient of KL(policy || reference); k2 and k3 have nearly none, of the
wrong sign: they make a token expensive that is rarer in the policy than in the reference, and so still rarer.
"""

from typing import Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from onbeat.contracts.section import IS_ACCEPTED, Float, Section
from onbeat.objectives.base.inputs import MAX_LOG_RATIO, Tensor

Estimator = Literal["k1", "k2", "k3"]


class KlConfig(Section):
    coef: Float = Field(0.0, ge=0, description="factor of the divergence; 0 skips the reference model altogether")
    estimator: Estimator = Field(
        "k3",
        description="estimator of the divergence from sampled tokens: k3 or k2 in the loss, k1 (the default there) in "
        "the reward; the others have no gradient there, or a wrong one",
    )
    placement: Literal["loss", "reward"] = Field(
        "loss", description="place of the divergence: in the token loss, or subtracted from rewards before advantages"
    )

    reference: Literal["base"] | None = Field(
        None,
        exclude_if=lambda reference: reference is None,
        description="model that the divergence is from. base: the one that the job was given; default: the same, or "
        "the one that its warm start has made",
    )

    @model_validator(mode="before")
    @classmethod
    def choose_estimator(cls, value: Any) -> Any:
        is_chosen = not isinstance(value, dict) or "estimator" in value or value.get("placement") != "reward"
        return value if is_chosen else {**value, "estimator": "k1"}

    @model_validator(mode="after")
    def check_estimator(self, info: ValidationInfo) -> "KlConfig":
        if self.coef == 0 or info.context == IS_ACCEPTED:
            return self
        if (self.estimator, self.placement) == ("k1", "loss"):
            raise ValueError(
                "kl.estimator: k1 in the loss pulls nowhere, since its expected gradient is 0; use k2 or k3, or "
                "placement = 'reward'"
            )
        if self.placement == "reward" and self.estimator != "k1":
            raise ValueError(
                f"kl.estimator: {self.estimator} in the reward pulls away from the reference; use k1, or placement = "
                "'loss'"
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
            # Both terms end at the bound: beyond it the linear one alone would push away from the reference.
            bounded = log_ratio.clamp(max=MAX_LOG_RATIO)
            return bounded.exp() - 1.0 - bounded
