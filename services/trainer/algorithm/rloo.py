"""RLOO: REINFORCE with a leave-one-out baseline (arXiv 2402.14740), per token.

    A_i = r_i - mean of the other rewards of the group = G / (G - 1) (r_i - mean(r)),     L = -rho A

The ratio rho is 1 when the old policy is the policy; the gradient then is that of -A * trainer_logprobs.
"""

import torch

from services.trainer.algorithm.inputs import LossInputs


def rloo_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[G] -> [G], G >= 2."""
    group_size = len(rewards)
    return (rewards - rewards.mean()) * group_size / (group_size - 1)


def rloo_token_loss(inputs: LossInputs) -> torch.Tensor:
    """[N]."""
    return -inputs.importance_ratio * inputs.advantages
