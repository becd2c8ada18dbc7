"""How token losses become one number, as a sum now and one division at the barrier.

The count of an iteration's tokens is known only when its last rollout is in. So each micro-batch adds an unnormalised
sum, and the accumulated gradient is divided once, before clipping: exactly the gradient of the mean.

    token_mean:     sum over all tokens / number of tokens
    sequence_mean:  sum over responses of (mean over its tokens) / number of responses
"""

import torch


def token_weights(normalization: str, response_lengths: torch.Tensor) -> torch.Tensor:
    """[R] tokens per response -> [N] weight of each token in the unnormalised sum."""
    if normalization == "token_mean":
        return torch.ones(int(response_lengths.sum()), device=response_lengths.device)
    if normalization == "sequence_mean":
        return (1.0 / response_lengths).repeat_interleave(response_lengths)
    raise ValueError(f"unknown normalization {normalization!r}")


def denominator(normalization: str, num_tokens: int, num_responses: int) -> int:
    """What the iteration's accumulated sum is divided by."""
    return {"token_mean": num_tokens, "sequence_mean": num_responses}[normalization]
