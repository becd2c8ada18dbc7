"""Shared-prompt attention on the CPU by fused kernels, following the structure instead of a dense T x T mask.

Per group: the prompt once, causally; then the responses over [prompt | own]: see `responses.py`. Behind a prefix, the
rest of a prompt is treated as such a response to the prefix.

Legend: H query heads, K key/value heads, T places, D head size, P prompt length.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.attention.layout import PackedLayout
from services.trainer.attention.responses import Batch, Inputs, attend, for_query_heads, kernel_dtype, plan_batches


@dataclass(frozen=True)
class GroupPlan:
    prompt: slice
    prompt_batches: tuple[Batch, ...] | None  # None: no prefix comes before it
    responses: slice
    batches: tuple[Batch, ...] | None  # None: no response has an input


@dataclass(frozen=True)
class SdpaPlan:
    prefix: slice  # a part of the row
    groups: tuple[GroupPlan, ...]

    def attend(
        self, query_HTD: torch.Tensor, key_KTD: torch.Tensor, value_KTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        query, key, value = query_HTD, key_KTD, value_KTD
        # The prefix is in float32, so the gradients of all groups are summed in float32.
        precise = torch.promote_types(key.dtype, torch.float32)
        prefix = [tensor[:, self.prefix].to(precise) for tensor in (key, value)]
        parts_HXD = []  # the order of the row
        for group in self.groups:
            prompt_query, prompt_key, prompt_value = (tensor[:, group.prompt] for tensor in (query, key, value))
            if group.prompt_batches is None:
                parts_HXD.append(attend_prompt(prompt_query, prompt_key, prompt_value, scale))
            else:
                prefix_key, prefix_value = (tensor.to(key.dtype) for tensor in prefix)
                prompt = Inputs(prompt_query, prompt_key, prompt_value, prefix_key, prefix_value)
                parts_HXD.append(attend(prompt, group.prompt_batches, scale))
                prompt_key = torch.cat([prefix_key, prompt_key], dim=1)
                prompt_value = torch.cat([prefix_value, prompt_value], dim=1)
            if group.batches is not None:
                own_query, own_key, own_value = (tensor[:, group.responses] for tensor in (query, key, value))
                responses = Inputs(own_query, own_key, own_value, prompt_key, prompt_value)
                parts_HXD.append(attend(responses, group.batches, scale))
        return torch.cat(parts_HXD, dim=1).transpose(0, 1)


def plan_sdpa(layout: PackedLayout) -> SdpaPlan:
    """Prepare everything that depends on the layout only, once per micro-batch."""
    device, groups = layout.position_ids.device, []
    for group in layout.spans:
        prompt = slice(group.prompt.start, group.prompt.end)
        is_behind_prefix = layout.prefix_length > 0 and group.prompt.start > 0
        prompt_batches = plan_batches((group.prompt.length,), device) if is_behind_prefix else None
        has_places = group.end > prompt.stop
        batches = plan_batches(group.segment_lengths, device) if has_places else None
        groups.append(GroupPlan(prompt, prompt_batches, slice(prompt.stop, group.end), batches))
    return SdpaPlan(slice(0, layout.prefix_length), tuple(groups))


def attend_prompt(
    query_HPD: torch.Tensor, key_KPD: torch.Tensor, value_KPD: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return the prompt's causal attention [H, P, D]."""
    dtype = kernel_dtype(key_KPD.dtype, key_KPD.shape[1])
    key, value = (for_query_heads(tensor.to(dtype), len(query_HPD))[None] for tensor in (key_KPD, value_KPD))
    attended = scaled_dot_product_attention(query_HPD[None].to(dtype), key, value, is_causal=True, scale=scale)
    return attended[0].to(query_HPD.dtype)
