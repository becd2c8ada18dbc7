"""On-policy distillation alone: the advantage of a token is the teacher's, from `[teacher]` (base/teacher.py).

    L = -rho A,    A_t = -coef (log p(y_t) - log q(y_t)),    rho = exp(trainer_logprobs - old_logprobs)

The gap is that of the policy in training, also where older weights generated (`bounded`), and no gradient flows through
it: rho alone corrects for the older ones. Rewards are only measured, so that a job needs none, and one response to each
prompt is enough.
"""

from typing import ClassVar, Literal

from pydantic import model_validator

from onbeat.objectives.base import LossInputs, PolicyObjective, Tensor, TokenLoss


class DistillObjective(PolicyObjective):
    """Reverse KL to a teacher on the policy's own samples (arXiv 2306.08543, arXiv 2306.13649)."""

    type: Literal["distill"]

    needs_reward: ClassVar[bool] = False

    @model_validator(mode="after")
    def check_kl_placement(self) -> "DistillObjective":
        if self.kl.coef > 0 and self.kl.placement == "reward":
            raise ValueError("objective.kl.placement: distill learns from no reward; use placement = 'loss'")
        return self

    def advantages(self, rewards: Tensor) -> Tensor:
        import torch

        return torch.zeros_like(rewards)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return -inputs.importance_ratio * inputs.advantages, None
