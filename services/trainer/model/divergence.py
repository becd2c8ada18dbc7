"""The reverse KL of a policy to its teacher over the whole vocabulary, without [N, V] logits in float32.

    K = sum over v of p(v) g(v),  g = clip(log p - log q),  d K / d l(v) = p(v) (g(v) - K),  l = h W^T / T

As in `logprobs.py`, logits are in the compute dtype for a block of rows, and in float32 for a few rows at a time. The
gap g is not differentiated, so that the gradient is the expectation of that of sampled tokens, whatever the clip.

Legend: N target tokens, M of them in a block, V tokens of the policy, U of the teacher, D and E widths, T temperature.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from services.trainer.model.logprobs import are_kept, blocks, divided, head_gradients, num_rows_of

Gap = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # log ratios [R, V], known tokens [V] -> gaps [R, V]


@dataclass(frozen=True)
class TeacherHead:
    """The teacher's side of a micro-batch; nothing in it has a gradient."""

    hidden: torch.Tensor  # [N, E]
    weight: torch.Tensor  # [U, E]
    is_known: torch.Tensor  # [V] bool: the policy's tokens that the teacher has, too; false beyond U
    gap: Gap
    temperature: float

    def compare(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return K [N] for hidden states [N, D] and the head [V, D] of the policy, with its gradient."""
        divergence: torch.Tensor = ReverseKl.apply(hidden, weight, self)
        return divergence


class ReverseKl(torch.autograd.Function):
    """A function (hidden [N, D], weight [V, D], the teacher's head) -> K [N]."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, teacher: TeacherHead) -> torch.Tensor:
        divergence, kept = [], []
        for block in blocks(hidden):
            slopes, values = slopes_of(hidden[block], weight, teacher, block)
            divergence.append(values)
            kept += [slopes] if are_kept(hidden, weight) else []
        ctx.save_for_backward(hidden, weight, *kept)
        ctx.teacher = teacher
        return torch.cat(divergence)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        hidden, weight, *kept = ctx.saved_tensors
        teacher = ctx.teacher
        again = (slopes_of(hidden[block], weight, teacher, block)[0] for block in blocks(hidden))
        scale = grads[0] / teacher.temperature
        return *head_gradients(kept or again, hidden, weight, scale, ctx.needs_input_grad[1]), None


def slopes_of(
    hidden: torch.Tensor, weight: torch.Tensor, teacher: TeacherHead, block: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (p (g - K), [M, V] in the compute dtype; K [M]) for the block's hidden states [M, D]."""
    precise = torch.promote_types(hidden.dtype, torch.float32)
    logits, teacher_logits = torch.mm(hidden, weight.T), torch.mm(teacher.hidden[block], teacher.weight.T)
    divergence = torch.empty(len(hidden), dtype=precise, device=hidden.device)
    num_shared = min(logits.shape[1], teacher_logits.shape[1])
    for start in range(0, len(hidden), num_rows_of(hidden.device)):
        rows = slice(start, start + num_rows_of(hidden.device))
        scaled = divided(logits[rows].to(precise), teacher.temperature)
        log_ratio, probabilities = scaled.log_softmax(-1), scaled.softmax(-1)
        log_q = divided(teacher_logits[rows].to(precise), teacher.temperature).log_softmax(-1)
        log_ratio[:, :num_shared] -= log_q[:, :num_shared]
        gap = teacher.gap(log_ratio, teacher.is_known)
        divergence[rows] = (probabilities * gap).sum(-1)
        logits[rows] = probabilities.mul_(gap.sub_(divergence[rows, None]))
    return logits, divergence
