"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783), section 3.2.

The advantage is only centred, A_i = r_i - mean(r): dividing by the standard deviation favours prompts that are almost
always or almost never solved. The sum of token losses is divided by a constant (`normalization = "constant"`: responses
times `max_response_tokens`), since dividing by each response's own length favours long wrong answers. The token loss
is GRPO's.
"""

import torch


def dr_grpo_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """[G] -> [G]. Exact zeros when all rewards are equal."""
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()
