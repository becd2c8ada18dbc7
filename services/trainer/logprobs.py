"""Log-probabilities of target tokens from hidden states, without ever holding [N, V] logits in float32.

The head of a small model with a large vocabulary costs more memory traffic than arithmetic: float32 logits are written
and read about ten times by softmax and its gradient. Here rows are done in small chunks that stay in the cache, the
backward pass computes the logits again, and gradients are formed directly:

    l = h W^T / T,  logp = l[y] - logsumexp(l),  d logp / d l = onehot(y) - softmax(l)

Legend: N target tokens, V vocabulary, D model, y the target, T the temperature.
"""

from typing import Any

import torch

ROWS = 64  # rows of float32 logits at a time: 64 x 50,000 x 4 bytes is 13 MB
BLOCK_ROWS = 1024  # rows of logit gradients at a time, in the compute dtype, for one matrix product


class TargetLogprobs(torch.autograd.Function):
    """(hidden [N, D], weight [V, D], targets [N], temperature) -> (logprobs [N], entropy [N], no gradient)."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        precise = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, normaliser = (torch.empty(len(hidden), dtype=precise, device=hidden.device) for _ in "123")
        for start in range(0, len(hidden), ROWS):
            rows = slice(start, start + ROWS)
            logits = torch.mm(hidden[rows], weight.T).to(precise).div_(temperature)
            normaliser[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(-1, targets[rows, None])[:, 0] - normaliser[rows]
            probabilities = (logits - normaliser[rows, None]).exp_()
            entropy[rows] = normaliser[rows] - probabilities.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:  # type: ignore[override]
        hidden, weight, targets, normaliser = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        for start in range(0, len(hidden), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            grad_logits = logit_gradients(
                hidden[block], weight, targets[block], normaliser[block], grads[0][block], ctx.temperature
            )
            torch.mm(grad_logits, weight, out=grad_hidden[block])
            if ctx.needs_input_grad[1]:  # a frozen head (LoRA) has none
                product = torch.mm(grad_logits.T, hidden[block])
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        return grad_hidden, grad_weight, None, None


def logit_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    normaliser: torch.Tensor,
    grad_logprobs: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """[M, V] in the compute dtype: the gradient with respect to h W^T, grad (onehot - softmax) / T, of M rows."""
    gradients = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
    scale = grad_logprobs / temperature
    for start in range(0, len(hidden), ROWS):
        rows = slice(start, start + ROWS)
        logits = torch.mm(hidden[rows], weight.T).to(normaliser.dtype).div_(temperature)
        minus_softmax = logits.sub_(normaliser[rows, None]).exp_().mul_(-scale[rows, None])
        minus_softmax.scatter_add_(-1, targets[rows, None], scale[rows, None])
        gradients[rows] = minus_softmax
    return gradients
