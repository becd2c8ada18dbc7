"""Shared-prompt attention on the CPU where keys are few: one group after another, in plain batched products.

Below some hundred keys a fused kernel spends its time on calling small products. Here a group takes a dozen batched
ones, on tensors that stay in the cache:

    prompt rows      over [prefix | prompt], causally
    response rows    over [prefix | prompt | own], own causally, with one softmax over all

Responses are padded at the end, where causality hides the padding from real rows; the gradient of padded rows is zero.

The prefix is a group without responses. Every other group adds to the gradient of its keys.

Legend: T places of the packed row, F of its prefix; of a group P prompt places, G responses, R places of the longest. H
query heads, K key/value heads, each shared by Q = H / K query heads, D head size. X rows of queries, B products in a
batch, S keys.
Scores are float32 (float64 for float64); probabilities are kept in the compute dtype, in which they meet the values.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from services.trainer.attention.layout import GroupSpan, PackedLayout

MAX_KEYS = 384  # of a prompt and its longest response; above, the fused kernel is quicker


@dataclass(frozen=True)
class Keys:
    index_BS: torch.Tensor  # which of the T * K
    is_hidden: torch.Tensor | None  # [X / B, S]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """[T * K, D] -> [B, S, D]"""
        return tensor.index_select(0, self.index_BS.flatten()).unflatten(0, self.index_BS.shape)

    def per_product(self, rows: torch.Tensor) -> torch.Tensor:
        """[X, ...] -> [B, X / B, ...]"""
        return rows.unflatten(0, (len(self.index_BS), -1))


@dataclass(frozen=True)
class Rows:
    """Queries and the keys that share their softmax."""

    index_X: torch.Tensor  # which of the T * H
    is_padded_X1: torch.Tensor
    key_sets: tuple[Keys, ...]

    def split(self, weights: torch.Tensor) -> Iterator[tuple[Keys, torch.Tensor]]:
        """[X, all keys] -> each key set with its [B, X / B, S]."""
        widths = [keys.index_BS.shape[1] for keys in self.key_sets]
        for keys, part in zip(self.key_sets, weights.split(widths, dim=1), strict=True):
            yield keys, keys.per_product(part)


@dataclass(frozen=True)
class ShortGroup:
    prompt: Rows
    responses: Rows | None  # None: no response has an input
    query_places: slice  # of the T * H
    key_places: slice  # of the T * K
    row_of_query: torch.Tensor  # [places * H], into the prompt's rows and then the responses'
    row_of_key: torch.Tensor  # [places * K], into the prefix' and prompt's keys and then the responses' own
    row_of_prefix: torch.Tensor  # [F * K], into the same; empty for the prefix itself

    @property
    def parts(self) -> list[Rows]:
        return [self.prompt] if self.responses is None else [self.prompt, self.responses]


class ShortPlan:
    def __init__(self, layout: PackedLayout) -> None:
        self._layout = layout
        self._groups: dict[tuple[int, int], list[ShortGroup]] = {}  # by heads: the same for every layer

    def attend(
        self, query_BHTD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Returns [B, T, H, D]. B must be 1."""
        assert query_BHTD.shape[0] == 1, "the packed row is the batch"
        heads = query_BHTD.shape[1], key_BKTD.shape[1]
        if heads not in self._groups:
            self._groups[heads] = [plan_group(group, self._layout, *heads) for group in self._layout.spans]
        rows = (tensor[0].transpose(0, 1).flatten(0, 1) for tensor in (query_BHTD, key_BKTD, value_BKTD))
        scale = query_BHTD.shape[-1] ** -0.5 if scale is None else scale
        return ShortAttention.apply(*rows, self._groups[heads], scale).unflatten(0, (-1, heads[0]))[None]


def is_short(layout: PackedLayout) -> bool:
    longest = max(group.prompt_length + max(group.response_lengths) for group in layout.groups)
    return layout.prefix_length + longest <= MAX_KEYS


class ShortAttention(torch.autograd.Function):
    """(query [T * H, D], key and value [T * K, D], groups, scale) -> [T * H, D]."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        query, key, value, groups, scale = arguments
        precise = torch.promote_types(query.dtype, torch.float32)
        scaled_key = key.to(precise).mul(scale)
        output, probabilities = torch.empty_like(query), []
        for group in groups:
            attended = []
            for rows in group.parts:
                own = query.index_select(0, rows.index_X).to(precise)
                weights = torch.cat([scores(own, keys, scaled_key) for keys in rows.key_sets], dim=1).softmax(-1)
                probabilities.append(weights.to(value.dtype))
                attended.append(
                    sum_of_products((part, keys.take(value)) for keys, part in rows.split(probabilities[-1]))
                )
            output[group.query_places] = torch.cat(attended).index_select(0, group.row_of_query)
        ctx.save_for_backward(query, key, value, *probabilities)
        ctx.groups, ctx.scale = groups, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, *probabilities = ctx.saved_tensors
        precise_value = value.to(torch.promote_types(query.dtype, torch.float32))
        grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        num_prefix = len(ctx.groups[-1].row_of_prefix)
        prefix_grads = precise_value.new_zeros(2, num_prefix, key.shape[1])
        saved = iter(probabilities)
        for group in ctx.groups:
            of_queries: list[torch.Tensor] = []
            key_factors: list[tuple[torch.Tensor, torch.Tensor]] = []
            value_factors: list[tuple[torch.Tensor, torch.Tensor]] = []
            for rows in group.parts:
                own = query.index_select(0, rows.index_X)
                grad = grads[0].index_select(0, rows.index_X).masked_fill_(rows.is_padded_X1, 0.0)
                weights = next(saved)
                grad_scores = score_gradients(grad, weights, rows, precise_value).mul_(ctx.scale).to(query.dtype)
                of_queries.append(sum_of_products((part, keys.take(key)) for keys, part in rows.split(grad_scores)))
                key_factors += [(part.mT, keys.per_product(own)) for keys, part in rows.split(grad_scores)]
                value_factors += [(part.mT, keys.per_product(grad)) for keys, part in rows.split(weights)]
            grad_query[group.query_places] = torch.cat(of_queries).index_select(0, group.row_of_query)
            found = by_key(key_factors), by_key(value_factors)
            for of_keys, into, into_prefix in zip(found, (grad_key, grad_value), prefix_grads, strict=True):
                into[group.key_places] = of_keys.index_select(0, group.row_of_key)
                into_prefix[: len(group.row_of_prefix)] += of_keys.index_select(0, group.row_of_prefix)
        for into, into_prefix in zip((grad_key, grad_value), prefix_grads, strict=True):
            into[:num_prefix] = into_prefix.add_(into[:num_prefix])
        return grad_query, grad_key, grad_value, None, None


def scores(query_XD: torch.Tensor, keys: Keys, key: torch.Tensor) -> torch.Tensor:
    """[X, S], minus infinity where hidden."""
    found = keys.per_product(query_XD) @ keys.take(key).mT
    if keys.is_hidden is not None:
        found.masked_fill_(keys.is_hidden, float("-inf"))
    return found.flatten(0, 1)


def score_gradients(grad_XD: torch.Tensor, weights: torch.Tensor, rows: Rows, value: torch.Tensor) -> torch.Tensor:
    """Softmax backwards: p (dp - sum of p dp), [X, all keys] in the value's dtype."""
    grad_XD, weights = grad_XD.to(value.dtype), weights.to(value.dtype)
    products = [(keys.per_product(grad_XD) @ keys.take(value).mT).flatten(0, 1) for keys in rows.key_sets]
    grad_weights = torch.cat(products, dim=1)
    return torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)


def by_key(factors: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The prompt's keys are seen by prompt rows and then by response rows, which have own keys besides."""
    return torch.cat([sum_of_products(factors[:2]), *(sum_of_products([pair]) for pair in factors[2:])])


def sum_of_products(factors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """[X, D] from pairs of [B, X / B, S] and [B, S, D]; later products are added before they are rounded."""
    (left, right), *others = factors
    total = (left @ right).flatten(0, 1)
    for left, right in others:
        total.unflatten(0, (len(left), -1)).baddbmm_(left, right)
    return total


# ---- which row lies where --------------------------------------------------------------------------------------------


def plan_group(group: GroupSpan, layout: PackedLayout, num_heads: int, num_keys: int) -> ShortGroup:
    prefix_length = layout.prefix_length if group.start > 0 else 0  # none before the prefix itself
    shared = num_heads // num_keys
    head_KQ = torch.arange(num_heads).view(num_keys, shared)
    key_K1 = torch.arange(num_keys)[:, None]
    place_F, place_P = torch.arange(prefix_length), group.start + torch.arange(group.prompt_length)
    place_GR, is_padded_GR = padded_places(group)

    prompt_query_KQP = place_P * num_heads + head_KQ[..., None]
    prompt_key_KS = torch.cat([place_F, place_P]) * num_keys + key_K1
    query_KGQR = place_GR[:, None] * num_heads + head_KQ[:, None, :, None]
    key_KGR = place_GR * num_keys + key_K1[..., None]
    is_padded_KGQR = is_padded_GR[:, None].expand(query_KGQR.shape)

    never_padded = torch.zeros(prompt_query_KQP.numel(), 1, dtype=torch.bool)
    over_prompt = Keys(prompt_key_KS, causal(len(place_P), shared, prefix_length))
    prompt = Rows(prompt_query_KQP.flatten(), never_padded, (over_prompt,))
    responses = None
    if place_GR.shape[1]:
        own = Keys(key_KGR.flatten(0, 1), causal(place_GR.shape[1], shared))
        is_padded_X1 = is_padded_KGQR.flatten()[:, None]
        responses = Rows(query_KGQR.flatten(), is_padded_X1, (Keys(prompt_key_KS, None), own))
    queries, keys = (slice(group.start * heads, group.end * heads) for heads in (num_heads, num_keys))
    is_padded = torch.cat([never_padded.flatten(), is_padded_KGQR.flatten()])
    row_of_query = inverse(torch.cat([prompt_query_KQP.flatten(), query_KGQR.flatten()]), is_padded, queries)
    is_elsewhere = torch.cat([(prompt_key_KS < keys.start).flatten(), is_padded_GR.flatten().repeat(num_keys)])
    row_of_key = inverse(torch.cat([prompt_key_KS.flatten(), key_KGR.flatten()]), is_elsewhere, keys)
    row_of_prefix = (place_F[:, None] + torch.arange(num_keys) * prompt_key_KS.shape[1]).flatten()
    return ShortGroup(prompt, responses, queries, keys, row_of_query, row_of_key, row_of_prefix)


def padded_places(group: GroupSpan) -> tuple[torch.Tensor, torch.Tensor]:
    """[G, R] of each response: its places, then some place and true in the second tensor."""
    starts_G1, lengths_G1 = (
        torch.tensor(values)[:, None] for values in (group.response_starts, group.response_lengths)
    )
    step_R = torch.arange(max(group.response_lengths))
    is_padded_GR = step_R >= lengths_G1
    return (starts_G1 + step_R).masked_fill(is_padded_GR, group.start), is_padded_GR


def causal(length: int, shared: int, before: int = 0) -> torch.Tensor:
    """[Q * length, before + length]: true where a later key is hidden, for each of the heads that share the keys."""
    return torch.ones(length, before + length, dtype=torch.bool).triu(1 + before).repeat(shared, 1)


def inverse(index: torch.Tensor, is_elsewhere: torch.Tensor, places: slice) -> torch.Tensor:
    """For each of the places the row that has it as its index; not one that is padded or lies in another group."""
    rows = torch.empty(places.stop - places.start, dtype=torch.int64)
    rows[index[~is_elsewhere] - places.start] = (~is_elsewhere).nonzero()[:, 0]
    return rows
