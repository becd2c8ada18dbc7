"""Shared-prompt attention on the CPU for few keys: groups of similar size together, in plain batched products.

Below a few hundred keys, a fused kernel spends its time on calling small products. Here such groups take a dozen
batched ones:

    prompt rows      over [prefix | prompt], causally
    response rows    over [prefix | prompt | own], own causally, with one softmax over all

Prompts and responses are padded at the end, where causality hides the padding from real rows, and a mask hides that of
a prompt from responses; the gradient of padded rows is zero. The prefix is a group without responses; every other group
adds to the gradient of the prefix's keys.

Legend: T places of the packed row, F of its prefix; N groups together, P places of the longest prompt, G responses, R
places of the longest. H query heads, K key/value heads, each shared by Q = H / K query heads, D head size. X rows of
queries, B products in a batch, S keys.
Scores are float32 (float64 for float64); probabilities are kept in the compute dtype, in which they meet the values.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from services.trainer.attention.layout import GroupSpan, PackedLayout

MAX_KEYS = 384  # keys of prefix, prompt and longest response; with more, the fused kernel is faster
MAX_PADDED = 1.25  # rows of groups batched together, relative to their rows one by one
MAX_ROWS = 4096  # rows per head of groups batched together: their scores are held in float32


@dataclass(frozen=True)
class Keys:
    index_BS: torch.Tensor  # index into T * K
    is_hidden: torch.Tensor | None  # [X / B, S] or [B, 1, S]

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the rows of these keys: [T * K, D] -> [B, S, D]."""
        return torch.unflatten(tensor.index_select(0, self.index_BS.flatten()), 0, self.index_BS.shape)

    def per_product(self, rows: torch.Tensor) -> torch.Tensor:
        """Split rows by product: [X, ...] -> [B, X / B, ...]."""
        return torch.unflatten(rows, 0, (len(self.index_BS), -1))


@dataclass(frozen=True)
class Rows:
    """Queries and the keys that share their softmax."""

    index_X: torch.Tensor  # index into T * H
    is_padded_X1: torch.Tensor
    key_sets: tuple[Keys, ...]

    def split(self, weights: torch.Tensor) -> Iterator[tuple[Keys, torch.Tensor]]:
        """Yield each key set with its part [B, X / B, S] of the weights [X, all keys]."""
        widths = [keys.index_BS.shape[1] for keys in self.key_sets]
        for keys, part in zip(self.key_sets, weights.split(widths, dim=1), strict=True):
            yield keys, keys.per_product(part)


@dataclass(frozen=True)
class GroupSet:
    prompts: Rows
    responses: Rows | None  # None: no response has an input
    query_places: slice  # a part of T * H
    key_places: slice  # a part of T * K
    row_of_query: torch.Tensor  # [places * H], into the prompt's rows and then the responses'
    row_of_key: torch.Tensor  # [places * K], into the keys of prefix and prompts and then the responses' own
    row_of_prefix_NF: torch.Tensor  # [N, F * K], into the same; no columns for the prefix itself

    @property
    def parts(self) -> list[Rows]:
        return [self.prompts] if self.responses is None else [self.prompts, self.responses]


class ShortPlan:
    def __init__(self, layout: PackedLayout) -> None:
        self._layout = layout
        self._sets: dict[tuple[int, int], list[GroupSet]] = {}  # sets by heads: the same for every layer

    def attend(
        self, query_HTD: torch.Tensor, key_KTD: torch.Tensor, value_KTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        num_heads, num_keys = heads = len(query_HTD), len(key_KTD)
        if heads not in self._sets:
            sets = alike(self._layout)
            self._sets[heads] = [plan_groups(groups, self._layout, num_heads, num_keys) for groups in sets]
        query, key, value = (tensor.transpose(0, 1).flatten(0, 1) for tensor in (query_HTD, key_KTD, value_KTD))
        scale = query_HTD.shape[-1] ** -0.5 if scale is None else scale
        attended: torch.Tensor = ShortAttention.apply(query, key, value, self._sets[heads], scale)  # [T * H, D]
        return torch.unflatten(attended, 0, (-1, num_heads))


def is_short(layout: PackedLayout) -> bool:
    longest = max(group.prompt.length + max(group.segment_lengths) for group in layout.groups)
    return layout.prefix_length + longest <= MAX_KEYS


class ShortAttention(torch.autograd.Function):
    """A function (query [T * H, D], key and value [T * K, D], group sets, scale) -> [T * H, D]."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        query, key, value, sets, scale = arguments
        precise = torch.promote_types(query.dtype, torch.float32)
        scaled_key = key.to(precise).mul(scale)
        output, probabilities = torch.empty_like(query), []
        for groups in sets:
            attended = []
            for rows in groups.parts:
                query_XD = query.index_select(0, rows.index_X).to(precise)
                weights = torch.cat([scores(query_XD, keys, scaled_key) for keys in rows.key_sets], dim=1).softmax(-1)
                probabilities.append(weights.to(value.dtype))
                attended.append(
                    sum_of_products((part, keys.take(value)) for keys, part in rows.split(probabilities[-1]))
                )
            output[groups.query_places] = torch.cat(attended).index_select(0, groups.row_of_query)
        ctx.save_for_backward(query, key, value, *probabilities)
        ctx.sets, ctx.scale = sets, scale
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, *probabilities = ctx.saved_tensors
        precise_value = value.to(torch.promote_types(query.dtype, torch.float32))
        grad_query, grad_key, grad_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        num_prefix = ctx.sets[-1].row_of_prefix_NF.shape[1]
        prefix_grads = precise_value.new_zeros(2, num_prefix, key.shape[1])
        saved = iter(probabilities)
        for groups in ctx.sets:
            of_queries: list[torch.Tensor] = []
            key_factors: list[tuple[torch.Tensor, torch.Tensor]] = []
            value_factors: list[tuple[torch.Tensor, torch.Tensor]] = []
            for rows in groups.parts:
                query_XD = query.index_select(0, rows.index_X)
                grad = grads[0].index_select(0, rows.index_X).masked_fill_(rows.is_padded_X1, 0.0)
                weights = next(saved)
                grad_scores = score_gradients(grad, weights, rows, precise_value).mul_(ctx.scale).to(query.dtype)
                of_queries.append(sum_of_products((part, keys.take(key)) for keys, part in rows.split(grad_scores)))
                key_factors += [(part.mT, keys.per_product(query_XD)) for keys, part in rows.split(grad_scores)]
                value_factors += [(part.mT, keys.per_product(grad)) for keys, part in rows.split(weights)]
            grad_query[groups.query_places] = torch.cat(of_queries).index_select(0, groups.row_of_query)
            gradients = by_key(key_factors), by_key(value_factors)
            for of_keys, into, into_prefix in zip(gradients, (grad_key, grad_value), prefix_grads, strict=True):
                into[groups.key_places] = of_keys.index_select(0, groups.row_of_key)
                if groups.row_of_prefix_NF.numel():
                    into_prefix += of_keys[groups.row_of_prefix_NF].sum(0, dtype=into_prefix.dtype)
        for into, into_prefix in zip((grad_key, grad_value), prefix_grads, strict=True):
            into[:num_prefix] = into_prefix.add_(into[:num_prefix])
        return grad_query, grad_key, grad_value, None, None


def scores(query_XD: torch.Tensor, keys: Keys, key: torch.Tensor) -> torch.Tensor:
    """Return the scores [X, S], minus infinity where hidden."""
    scores = keys.per_product(query_XD) @ keys.take(key).mT
    if keys.is_hidden is not None:
        scores.masked_fill_(keys.is_hidden, float("-inf"))
    return scores.flatten(0, 1)


def score_gradients(grad_XD: torch.Tensor, weights: torch.Tensor, rows: Rows, value: torch.Tensor) -> torch.Tensor:
    """Backpropagate through the softmax: p (dp - sum of p dp), [X, all keys] in the value's dtype."""
    grad_XD, weights = grad_XD.to(value.dtype), weights.to(value.dtype)
    products = [(keys.per_product(grad_XD) @ keys.take(value).mT).flatten(0, 1) for keys in rows.key_sets]
    grad_weights = torch.cat(products, dim=1)
    grad_scores: torch.Tensor = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    return grad_scores


def by_key(factors: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Sum products by key: prompt rows and response rows see the prompt's keys; response rows also have their own."""
    return torch.cat([sum_of_products(factors[:2]), *(sum_of_products([pair]) for pair in factors[2:])])


def sum_of_products(factors: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Sum products of [B, X / B, S] and [B, S, D] to [X, D]; later products are added before they are rounded."""
    (left, right), *others = factors
    total = (left @ right).flatten(0, 1)
    for left, right in others:
        total.unflatten(0, (len(left), -1)).baddbmm_(left, right)
    return total


# ---- indices of rows -------------------------------------------------------------------------------------------------


def alike(layout: PackedLayout) -> list[list[GroupSpan]]:
    """Batch neighbouring groups, in order, where padding costs little. The prefix stays by itself."""
    sets: list[list[GroupSpan]] = []
    for group in layout.spans:
        together = [*sets[-1], group] if sets else [group]
        is_behind_prefix = together[0].prompt.start >= layout.prefix_length
        most = min(MAX_ROWS, MAX_PADDED * sum(num_rows([span]) for span in together))
        if sets and is_behind_prefix and num_rows(together) <= most:
            sets[-1] = together
        else:
            sets.append([group])
    return sets


def num_rows(groups: list[GroupSpan]) -> int:
    """Count the rows of each head, with padding."""
    num_responses = max(len(group.segment_lengths) for group in groups)
    longest = max(length for group in groups for length in group.segment_lengths)
    return len(groups) * (max(group.prompt.length for group in groups) + num_responses * longest)


def plan_groups(groups: list[GroupSpan], layout: PackedLayout, num_heads: int, num_keys: int) -> GroupSet:
    prefix_length = layout.prefix_length if groups[0].prompt.start > 0 else 0  # none before the prefix itself
    shared = num_heads // num_keys
    head_KQ, key_K = torch.arange(num_heads).view(num_keys, shared), torch.arange(num_keys)
    place_NP, is_padded_NP, place_NGR, is_padded_NGR = padded_places(groups)
    place_NF = torch.arange(prefix_length).expand(len(groups), -1)
    is_padded_NS = torch.cat([torch.zeros_like(place_NF, dtype=torch.bool), is_padded_NP], dim=1)

    prompt_query_KNQP = place_NP[:, None] * num_heads + head_KQ[:, None, :, None]
    prompt_key_KNS = torch.cat([place_NF, place_NP], dim=1) * num_keys + key_K[:, None, None]
    query_KNGQR = place_NGR[:, :, None] * num_heads + head_KQ[:, None, None, :, None]
    key_KNGR = place_NGR * num_keys + key_K[:, None, None, None]
    is_padded_KNQP = is_padded_NP[:, None].expand(prompt_query_KNQP.shape)
    is_padded_KNGQR = is_padded_NGR[:, :, None].expand(query_KNGQR.shape)

    prompt_key_BS = prompt_key_KNS.flatten(0, 1)
    over_prompt = Keys(prompt_key_BS, causal(place_NP.shape[1], shared, prefix_length))
    prompts = Rows(prompt_query_KNQP.flatten(), is_padded_KNQP.flatten()[:, None], (over_prompt,))
    responses = None
    if key_KNGR.shape[-1]:
        is_hidden_B1S = is_padded_NS.repeat(num_keys, 1)[:, None] if is_padded_NS.any() else None
        response_keys = Keys(key_KNGR.flatten(0, 2), causal(key_KNGR.shape[-1], shared))
        key_sets = (Keys(prompt_key_BS, is_hidden_B1S), response_keys)
        responses = Rows(query_KNGQR.flatten(), is_padded_KNGQR.flatten()[:, None], key_sets)

    queries, keys = (slice(groups[0].prompt.start * heads, groups[-1].end * heads) for heads in (num_heads, num_keys))
    is_padded = torch.cat([is_padded_KNQP.flatten(), is_padded_KNGQR.flatten()])
    row_of_query = inverse(torch.cat([prompt_query_KNQP.flatten(), query_KNGQR.flatten()]), is_padded, queries)
    is_elsewhere_KNS = (prompt_key_KNS < keys.start) | is_padded_NS
    is_elsewhere = torch.cat([is_elsewhere_KNS.flatten(), is_padded_NGR.flatten().repeat(num_keys)])
    row_of_key = inverse(torch.cat([prompt_key_KNS.flatten(), key_KNGR.flatten()]), is_elsewhere, keys)
    row_KNS = torch.arange(prompt_key_KNS.numel()).view(prompt_key_KNS.shape)
    row_of_prefix_NF = row_KNS[..., :prefix_length].permute(1, 2, 0).flatten(1)  # as keys lie: place by place
    return GroupSet(prompts, responses, queries, keys, row_of_query, row_of_key, row_of_prefix_NF)


def padded_places(groups: list[GroupSpan]) -> tuple[torch.Tensor, ...]:
    """Return places of the prompts [N, P] and which of them are padding, and the same for responses [N, G, R].

    Padding holds some place of the groups.
    """
    num_responses = max(len(group.segment_lengths) for group in groups)
    spans = [[(segment.start, segment.length) for segment in group.segments] for group in groups]
    filled = torch.tensor(
        [[*group_spans, *[(0, 0)] * (num_responses - len(group_spans))] for group_spans in spans]
    )  # [N, G, 2]
    places = []
    prompts = torch.tensor([(group.prompt.start, group.prompt.length) for group in groups]).unbind(1)
    for start, length in (prompts, filled.unbind(2)):
        step = torch.arange(int(length.max()))
        is_padded = step >= length[..., None]
        places += [(start[..., None] + step).masked_fill(is_padded, groups[0].prompt.start), is_padded]
    return tuple(places)


def causal(length: int, shared: int, before: int = 0) -> torch.Tensor:
    """Return [Q * length, before + length], true where a later key is hidden, for each head that shares the keys."""
    return torch.ones(length, before + length, dtype=torch.bool).triu(1 + before).repeat(shared, 1)


def inverse(index: torch.Tensor, is_elsewhere: torch.Tensor, places: slice) -> torch.Tensor:
    """Return for each place the row that has it as its index, except rows of padding or of other groups."""
    rows = torch.empty(places.stop - places.start, dtype=torch.int64)
    rows[index[~is_elsewhere] - places.start] = (~is_elsewhere).nonzero()[:, 0]
    return rows
