"""GSPO: one importance ratio per response (arXiv 2507.18071), eq. 5 and 7, in its token form (eq. 13).

    s = exp(mean over the response's tokens of (trainer_logprobs - old_logprobs))
    L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

The token form keeps the value s and lets the gradient flow through each token: s_t = sg(s) exp(logp_t - sg(logp_t)).
The clip acts on whole responses. Usual bounds are of the order of 1e-4, far smaller than GRPO's.
"""

import torch

from services.trainer.algorithm.inputs import LossInputs, ratio_of


def gspo_token_loss(inputs: LossInputs, clip_low: float, clip_high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] and whether the clip cut the token's gradient off (bool)."""
    log_ratio = inputs.trainer_logprobs.detach() - inputs.old_logprobs
    response_ratio = ratio_of(inputs.response_mean(log_ratio))
    token_ratio = response_ratio * (inputs.trainer_logprobs - inputs.trainer_logprobs.detach()).exp()
    surrogate = token_ratio * inputs.advantages
    clipped = token_ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * inputs.advantages
    return -torch.minimum(surrogate, clipped), clipped < surrogate
