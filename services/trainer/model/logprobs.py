"""Log-probabilities of target tokens from hidden states, without [N, V] logits in float32.

The head of a small model with a large vocabulary costs more memory traffic than arithmetic: float32 logits are written
and read about ten times by softmax and its gradient. Here they exist for a few rows at a time, which stay in the cache.
From them the backward pass needs only E, in the compute dtype:

    l = h W^T / T,  logp = l[y] - logsumexp(l),  d logp / d l = onehot(y) - softmax(l) = -E
    d logp / d h = -E W / T,  d logp / d W = -E^T h / T

The E of a single block is kept for the backward pass, and so are those of more blocks up to KEPT_BYTES. Otherwise each
E is computed again when it is needed.

Legend: N target tokens, M of them in a block, V vocabulary, D model, y the target, T the temperature.
"""

from collections.abc import Iterable
from typing import Any

import torch

from services.trainer.model.lean_layers import kept_gradient

BLOCK_ROWS = 1024  # rows for one matrix product: 1,024 x 50,000 x 2 bytes is 100 MB
KEPT_BYTES = 512 << 20
ROWS = 8  # rows of float32 at a time: 8 x 50,000 x 4 bytes is 1.6 MB
TOKENS = 4096  # tokens of the vocabulary whose gradients are added at a time
ROWS_ON_DEVICE = 128  # an H100 takes 1.7 times as long for 16; 1,024 gain 8% more, for eight times the memory


class TargetLogprobs(torch.autograd.Function):
    """A function (hidden [N, D], weight [V, D], targets [N], temperature) -> (logprobs [N], entropy [N]).

    The entropy has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy, kept = [], [], []
        is_kept = are_kept(hidden, weight)
        for block in blocks(hidden):
            excess, *values = excess_probabilities(hidden[block], weight, targets[block], temperature)
            logprobs.append(values[0])
            entropy.append(values[1])
            if is_kept:
                kept.append(excess)
        ctx.save_for_backward(hidden, weight, targets, *kept)
        ctx.temperature = temperature
        joined = torch.cat(logprobs), torch.cat(entropy)
        ctx.mark_non_differentiable(joined[1])
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        hidden, weight, targets, *kept = ctx.saved_tensors

        def excess_of(block: slice) -> torch.Tensor:
            return excess_probabilities(hidden[block], weight, targets[block], ctx.temperature)[0]

        excess = iter(kept) if kept else map(excess_of, blocks(hidden))
        return *head_gradients(excess, hidden, weight, grads[0] / -ctx.temperature, ctx.needs_input_grad[1]), None, None


def head_gradients(
    factors: Iterable[torch.Tensor], hidden: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, has_weight: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gradients of hidden [N, D] and weight [V, D] from that of the logits: a factor [M, V] for each block,
    times `scale` [N]. `has_weight`: false for a frozen head (LoRA), which has no gradient."""
    grad_hidden, grad_weight, kept_grad = torch.empty_like(hidden), None, kept_gradient(weight)
    for factor, block in zip(factors, blocks(hidden), strict=True):
        scale_M1 = scale[block, None]
        grad_hidden[block] = torch.mm(factor, weight) * scale_M1
        if has_weight:
            scaled = (hidden[block] * scale_M1).to(hidden.dtype)
            if kept_grad is None:
                product = torch.mm(factor.T, scaled)
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
            elif kept_grad.dtype == factor.dtype:
                kept_grad.addmm_(factor.T, scaled)
            else:  # a part of the vocabulary at a time: each product is added while it is in the cache
                for tokens, sums in zip(factor.T.split(TOKENS), kept_grad.split(TOKENS), strict=True):
                    sums.add_(torch.mm(tokens, scaled))
    return grad_hidden, grad_weight


def divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide logits by the temperature, in place; a pass over them is saved where that changes nothing."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def are_kept(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the blocks [M, V] are kept for the backward pass."""
    return len(hidden) <= BLOCK_ROWS or len(hidden) * len(weight) * hidden.element_size() <= KEPT_BYTES


def num_rows_of(device: torch.device) -> int:
    """Return how many rows of a block are in float32 at a time."""
    return ROWS_ON_DEVICE if device.type in ("cuda", "npu") else ROWS


def blocks(hidden: torch.Tensor) -> list[slice]:
    return [slice(start, start + BLOCK_ROWS) for start in range(0, len(hidden), BLOCK_ROWS)]


def excess_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (E = softmax - onehot(target), [M, V] in the compute dtype; logprobs [M]; entropy [M])."""
    precise = torch.promote_types(hidden.dtype, torch.float32)
    logprobs, entropy = (torch.empty(len(hidden), dtype=precise, device=hidden.device) for _ in range(2))
    logits = torch.mm(hidden, weight.T)
    num_rows = num_rows_of(hidden.device)
    for start in range(0, len(hidden), num_rows):
        rows = slice(start, start + num_rows)
        target_R1 = targets[rows, None]
        scaled = divided(logits[rows].to(precise), temperature)
        log_probabilities, probabilities = scaled.log_softmax(-1), scaled.softmax(-1)  # an exp would take longer
        logprobs[rows] = log_probabilities.gather(-1, target_R1)[:, 0]
        entropy[rows] = -log_probabilities.mul_(probabilities).sum(-1)
        target_excess = torch.expm1(logprobs[rows, None])  # not p - 1, which is 0 for a p that rounds to 1
        logits[rows] = probabilities.scatter_(-1, target_R1, target_excess)
    return logits, logprobs, entropy
