"""Supervised training: cross-entropy on the learned tokens of examples.

    L = -log p(y_t),    summed over the learned tokens and divided by their number in the iteration, over all ranks

Examples are no samples: there are no rewards, advantages or ratios, and the temperature is 1.
"""

from typing import ClassVar, Literal

from pydantic import model_validator

from onbeat.objectives.base import Logprobs, Loss, Objective, Responses, Tensor


class SftObjective(Objective):
    """Negative log-likelihood of examples; a mean over tokens, so that a long answer counts more than a short one."""

    type: Literal["sft"]

    has_importance_ratio: ClassVar[bool] = False
    needs_reward: ClassVar[bool] = False
    has_advantages: ClassVar[bool] = False

    @model_validator(mode="after")
    def check_terms(self) -> "SftObjective":
        for name, has_effect in (
            ("kl.coef", self.kl.coef > 0),
            ("importance", self.importance is not None),
            ("signal", self.signal != "reward"),
        ):
            if has_effect:
                raise ValueError(f"objective.{name}: sft learns from examples, without rewards; leave it out")
        return self

    def has_signal(self, rewards: Tensor) -> bool:
        return True

    def loss(self, batch: Responses, logprobs: Logprobs, scale: float = 1.0) -> Loss:
        return Loss(-logprobs.trainer.sum(), 0, 0, {"loss": -logprobs.trainer})

    def denominator(self, num_tokens: int, num_responses: int, num_pairs: int, max_response_tokens: int) -> int:
        return num_tokens
