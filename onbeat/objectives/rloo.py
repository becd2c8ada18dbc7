"""RLOO: REINFORCE with a leave-one-out baseline (arXiv 2402.14740), per token.

    A_i = r_i - mean of the other rewards of the group = G / (G - 1) (r_i - mean(r)),     L = -rho A

The ratio rho is 1 when the old policy is the policy; the gradient then is that of -A * trainer_logprobs. Otherwise it
differs from TRL's: that is one ratio per response, and clipped.
"""

from typing import Literal

from onbeat.objectives.base import LossInputs, Normalization, PolicyObjective, Tensor, TokenLoss


class RlooObjective(PolicyObjective):
    """arXiv 2402.14740: leave-one-out baseline."""

    type: Literal["rloo"]
    normalization: Normalization = "sequence_sum"

    def advantages(self, rewards: Tensor) -> Tensor:
        group_size = len(rewards)
        return (rewards - rewards.mean()) * group_size / (group_size - 1)

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return -inputs.importance_ratio * inputs.advantages, None
