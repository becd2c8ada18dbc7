"""Shared-prompt attention on the CPU for rows in which a response forks, over the layout's segments.

Segments behind the same one are siblings: they see the same keys, those of the path to them, and each its own. So they
are to the path what a group's responses are to its prompt, and are computed like these: see `responses.py`.

    row        P1 | a0 a1 | b0 | c0 c1 | d0 | P2 | ...        a forks into b and c; a and d are siblings
    calls      P1 by itself, (a, d) behind P1, (b, c) behind P1 a, P2 by itself, ...

For the backward pass only the inputs, the output and its log-sum-exps are kept. A key belongs to several paths: their
gradients are added in float32.

Legend: H query heads, K key/value heads, T places, D head size; N places of siblings, P of their path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from services.trainer.attention.layout import PackedLayout, Segment
from services.trainer.attention.responses import (
    Batch,
    Call,
    Inputs,
    attend_responses,
    for_query_heads,
    kernel_dtype,
    plan_batches,
    response_gradients,
)


@dataclass(frozen=True)
class Siblings:
    places_N: torch.Tensor  # index into T
    path_P: torch.Tensor  # index into T; empty for a prefix, and for a prompt without one, which have no siblings
    batches: tuple[Batch, ...]

    def take(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Inputs:
        """Take the queries, keys and values of the siblings, and the keys and values of their path."""
        own_query, own_key, own_value = (tensor.index_select(1, self.places_N) for tensor in (query, key, value))
        path_key, path_value = (tensor.index_select(1, self.path_P) for tensor in (key, value))
        return Inputs(own_query, own_key, own_value, path_key, path_value)


@dataclass(frozen=True)
class TreePlan:
    families: tuple[Siblings, ...]

    def attend(
        self, query_HTD: torch.Tensor, key_KTD: torch.Tensor, value_KTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        out_HTD: torch.Tensor = TreeAttention.apply(query_HTD, key_KTD, value_KTD, self.families, scale)
        return out_HTD.transpose(0, 1)


def plan_tree(layout: PackedLayout) -> TreePlan:
    """Prepare everything that depends on the layout only, once per micro-batch."""
    families: dict[int, list[int]] = {}  # segments by a number for the shared part: the parent, or nothing
    for index, segment in enumerate(layout.segments):
        if segment.length > 0:
            families.setdefault(segment.parent if segment.parent >= 0 else -1 - index, []).append(index)
    device = layout.position_ids.device
    plans = []
    for members in families.values():
        segments, path = [layout.segments[index] for index in members], layout.path(members[0])
        batches = plan_batches([segment.length for segment in segments], device)
        plans.append(Siblings(places_of(segments).to(device), places_of(path).to(device), batches))
    return TreePlan(tuple(plans))


def places_of(segments: Sequence[Segment]) -> torch.Tensor:
    runs = [torch.arange(segment.start, segment.end) for segment in segments]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


class TreeAttention(torch.autograd.Function):
    """A function (query [H, T, D], key and value [K, T, D], families, scale) -> [H, T, D]."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        *tensors, families, scale = arguments
        query, key, value = (tensor.contiguous() for tensor in tensors)
        out_HTD = torch.empty_like(query, memory_format=torch.contiguous_format)
        lse_HT = torch.empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        for siblings in families:
            inputs = siblings.take(query, key, value)
            if len(siblings.path_P):
                out, lse = attend_responses(inputs, siblings.batches, scale)
            else:
                out, lse = (tensor[0] for tensor in alone(inputs, scale).attend())
            out_HTD.index_copy_(1, siblings.places_N, out.to(query.dtype))
            lse_HT.index_copy_(1, siblings.places_N, lse)
        ctx.save_for_backward(query, key, value, out_HTD, lse_HT)
        ctx.families, ctx.scale = families, scale
        return out_HTD

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, out_HTD, lse_HT = ctx.saved_tensors
        grad_HTD = grads[0].contiguous()
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=lse_HT.dtype) for tensor in (key, value))
        for siblings in ctx.families:
            inputs = siblings.take(query, key, value)
            grad, out, lse = (tensor.index_select(1, siblings.places_N) for tensor in (grad_HTD, out_HTD, lse_HT))
            if len(siblings.path_P):
                gradients = response_gradients(inputs, grad, out, lse, siblings.batches, ctx.scale)
            else:
                gradients = alone(inputs, ctx.scale).gradients(grad[None], out[None], lse[None])
                of_query, *of_keys = (tensor[0] for tensor in gradients)
                gradients = [of_query, *(tensor.unflatten(0, (len(key), -1)).sum(1) for tensor in of_keys)]
            grad_query.index_copy_(1, siblings.places_N, gradients[0].to(query.dtype))
            for places, parts in ((siblings.places_N, gradients[1:3]), (siblings.path_P, gradients[3:])):
                for total, part in zip((grad_key, grad_value), parts, strict=False):
                    total.index_add_(1, places, part.to(total.dtype))
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def alone(inputs: Inputs, scale: float | None) -> Call:
    """Return the call for causal attention without a path."""
    query_HND = inputs.query_HND
    dtype = kernel_dtype(query_HND.dtype, query_HND.shape[1])
    keys = (for_query_heads(tensor, len(query_HND)) for tensor in (inputs.key_KND, inputs.value_KND))
    query, key, value = (tensor.to(dtype)[None] for tensor in (query_HND, *keys))
    return Call(query, key, value, is_causal=True, scale=scale)
