"""CISPO: clip the importance weight, not the update (MiniMax-M1, arXiv 2506.13585), eq. 4 and 5.

    L = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A trainer_logprobs

No token loses its gradient; far off-policy ones only weigh less. The paper leaves the lower bound open (clip_low = 1).
"""

import torch

from services.trainer.algorithm.inputs import LossInputs


def cispo_token_loss(inputs: LossInputs, clip_low: float, clip_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] and whether the weight was clipped (bool)."""
    ratio = inputs.importance_ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * inputs.advantages * inputs.trainer_logprobs, weight != ratio
