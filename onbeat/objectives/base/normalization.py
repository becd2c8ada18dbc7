"""The reduction of token losses to one number: a sum now, and one division at the barrier.

The count of an iteration's tokens is known only when its last rollout is in. So each micro-batch adds an unnormalised
sum, and the accumulated gradient is divided once, before clipping: exactly the gradient of the mean.

    token_mean:     sum over all tokens / number of tokens
    sequence_mean:  sum over responses of the mean over its tokens / number of responses
    sequence_sum:   sum over all tokens / number of responses
    constant:       sum over all tokens / (number of responses * max_response_tokens)
"""

from typing import Literal

from onbeat.objectives.base.inputs import Tensor

Normalization = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]
NORMALIZATION = (
    "the loss is summed over tokens and divided by: all tokens; each response's own, then the number of responses; "
    "the number of responses; that times max_response_tokens"
)


def token_weights(normalization: str, response_lengths: Tensor, kept_lengths: Tensor | None = None) -> Tensor:
    """Return each token's weight [N] in the sum from the tokens per response [R] (and those that stay in the loss)."""
    import torch

    if normalization == "sequence_mean":
        kept = response_lengths if kept_lengths is None else kept_lengths
        return (1.0 / kept).repeat_interleave(response_lengths)
    return torch.ones(int(response_lengths.sum()), device=response_lengths.device)


def denominator(normalization: str, num_tokens: int, num_responses: int, max_response_tokens: int) -> int:
    """Return the divisor of the iteration's accumulated sum. Raises KeyError for an unknown name."""
    return {
        "token_mean": num_tokens,
        "sequence_mean": num_responses,
        "sequence_sum": num_responses,
        "constant": num_responses * max_response_tokens,
    }[normalization]
