"""Shared-prompt attention on torch's SDPA, following the structure instead of a dense T x T mask.

Per group: the prompt once, causally; then all responses as a batch of G rows whose keys are [prompt | own].

Legend: B = 1 row, H query heads, K key/value heads, T places, D head size, P prompt length, G responses, R longest.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.attention.layout import GroupSpan, PackedLayout

SHORT_ROWS = 256  # keys


@dataclass(frozen=True)
class GroupPlan:
    """Indices of one group that every layer reuses."""

    prompt: slice
    response_index_GR: torch.Tensor | None  # places of the responses, padded; None: no response has an input
    response_mask_G1RC: torch.Tensor | None  # additive over C = P + R keys, in the query's dtype


@dataclass(frozen=True)
class SdpaPlan:
    groups: tuple[GroupPlan, ...]
    inverse_T: torch.Tensor  # place -> row of the concatenated outputs


def plan_sdpa(layout: PackedLayout, dtype: torch.dtype) -> SdpaPlan:
    """Everything that depends on the layout only, once per micro-batch."""
    device = layout.position_ids.device
    plans, places = [], []
    for group in layout.groups:
        plan, group_places = plan_group(group, dtype, device)
        plans.append(plan)
        places.append(group_places)
    places_of_rows = torch.cat(places)
    inverse = torch.empty(layout.num_places, dtype=torch.long, device=device)
    real = (places_of_rows >= 0).nonzero().squeeze(1)
    inverse[places_of_rows[real]] = real
    return SdpaPlan(tuple(plans), inverse)


def plan_group(group: GroupSpan, dtype: torch.dtype, device: torch.device) -> tuple[GroupPlan, torch.Tensor]:
    """The group's plan and, for each row of its outputs (prompt, then G x R padded), the place or -1."""
    prompt = slice(group.start, group.start + group.prompt_length)
    prompt_places = torch.arange(prompt.start, prompt.stop, device=device)
    longest = max(group.response_lengths)
    if longest == 0:
        return GroupPlan(prompt, None, None), prompt_places
    starts = torch.tensor(group.response_starts, device=device)[:, None]
    lengths = torch.tensor(group.response_lengths, device=device)[:, None]
    steps = torch.arange(longest, device=device)[None]
    is_real_GR = steps < lengths
    index_GR = torch.where(is_real_GR, starts + steps, prompt.start)
    causal_RR = steps <= steps.T  # query row, key column
    own_GRR = causal_RR[None] & is_real_GR[:, None, :]
    prompt_GRP = torch.ones(len(starts), longest, group.prompt_length, dtype=torch.bool, device=device)
    allowed_GRC = torch.cat([prompt_GRP, own_GRR], dim=2)
    mask = torch.zeros(allowed_GRC.shape, dtype=dtype, device=device).masked_fill_(~allowed_GRC, float("-inf"))
    places = torch.where(is_real_GR, index_GR, -1).reshape(-1)
    return GroupPlan(prompt, index_GR, mask[:, None]), torch.cat([prompt_places, places])


def sdpa_attention(
    query_BHTD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, plan: SdpaPlan, scale: float | None
) -> torch.Tensor:
    """Returns [B, T, H, D]. B must be 1."""
    assert query_BHTD.shape[0] == 1, "the packed row is the batch"
    outputs = []
    for group in plan.groups:
        outputs += attend_group(query_BHTD[0], key_BKTD[0], value_BKTD[0], group, scale)
    return torch.cat(outputs, dim=0).index_select(0, plan.inverse_T)[None]


def attend_group(
    query_HTD: torch.Tensor, key_KTD: torch.Tensor, value_KTD: torch.Tensor, group: GroupPlan, scale: float | None
) -> list[torch.Tensor]:
    """The group's outputs as rows: [P, H, D] and, if any response has inputs, [G * R, H, D]."""
    keys_KPD, values_KPD = key_KTD[:, group.prompt], value_KTD[:, group.prompt]
    prompt_HPD = attend_prompt(query_HTD[:, group.prompt], keys_KPD, values_KPD, scale)
    outputs = [prompt_HPD.transpose(0, 1)]
    if group.response_index_GR is not None:
        keys_GKCD = with_prompt(keys_KPD, gather_rows(key_KTD, group.response_index_GR))
        values_GKCD = with_prompt(values_KPD, gather_rows(value_KTD, group.response_index_GR))
        queries_GHRD = gather_rows(query_HTD, group.response_index_GR)
        responses_GHRD = attend_responses(queries_GHRD, keys_GKCD, values_GKCD, group.response_mask_G1RC, scale)
        outputs.append(responses_GHRD.transpose(1, 2).flatten(0, 1))
    return outputs


def attend_prompt(
    query_HPD: torch.Tensor, key_KPD: torch.Tensor, value_KPD: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Causal, [H, P, D]."""
    repeats = len(query_HPD) // len(key_KPD)
    dtype = kernel_dtype(key_KPD)
    key, value = (tensor.to(dtype).repeat_interleave(repeats, dim=0)[None] for tensor in (key_KPD, value_KPD))
    attended = scaled_dot_product_attention(query_HPD[None].to(dtype), key, value, is_causal=True, scale=scale)
    return attended[0].to(query_HPD.dtype)


def attend_responses(
    query_GHRD: torch.Tensor,
    key_GKCD: torch.Tensor,
    value_GKCD: torch.Tensor,
    mask_G1RC: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """[G, H, R, D]. The H / K query heads that share a key head become more rows of it: keys are not repeated."""
    num_keys = key_GKCD.shape[1]
    repeats = query_GHRD.shape[1] // num_keys
    dtype = kernel_dtype(key_GKCD)
    rows_GKRD = query_GHRD.to(dtype).unflatten(1, (num_keys, repeats)).flatten(2, 3)
    mask = mask_G1RC.to(dtype).repeat(1, 1, repeats, 1)
    key, value = key_GKCD.to(dtype), value_GKCD.to(dtype)
    attended = scaled_dot_product_attention(rows_GKRD, key, value, attn_mask=mask, scale=scale)
    return attended.unflatten(2, (repeats, -1)).flatten(1, 2).to(query_GHRD.dtype)


def kernel_dtype(key: torch.Tensor) -> torch.dtype:
    """The CPU kernel is about twice as fast in float32 as in bfloat16 on short rows, and slower on long ones."""
    is_short_on_cpu = key.device.type == "cpu" and key.shape[-2] <= SHORT_ROWS
    return torch.float32 if is_short_on_cpu and key.dtype == torch.bfloat16 else key.dtype


def gather_rows(tensor_HTD: torch.Tensor, index_GR: torch.Tensor) -> torch.Tensor:
    """[H, T, D] at [G, R] -> [G, H, R, D]."""
    num_rows, longest = index_GR.shape
    picked = tensor_HTD.index_select(1, index_GR.reshape(-1))
    return picked.unflatten(1, (num_rows, longest)).transpose(0, 1)


def with_prompt(prompt_KPD: torch.Tensor, own_GKRD: torch.Tensor) -> torch.Tensor:
    """[G, K, P + R, D]: every response sees the same prompt before its own keys."""
    return torch.cat([prompt_KPD[None].expand(own_GKRD.shape[0], -1, -1, -1), own_GKRD], dim=2)
