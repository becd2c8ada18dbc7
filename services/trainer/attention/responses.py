"""Attention of a group's responses over [prompt | own] keys: two calls without a mask or copies of the prompt's keys:

    all response tokens over the prompt      one batch row; query heads that share a key head are more rows of it
    each response over itself, causally      short ones as a batch of G rows, padded at the end, where causality hides
                                             the padding; long ones one by one

The softmax over both follows from their log-sum-exps a and b: out = out_a exp(a - c) + out_b exp(b - c) with
c = log(exp a + exp b). The gradient follows too: the kernel's backward pass, given a part of the keys and the whole's
output and log-sum-exp, is that part's share (FlashAttention does the same over blocks of keys, arXiv 2205.14135).

Legend: H query heads, K key/value heads, D head size, P prompt length, N places of all responses, G responses, R the
longest of them. Log-sum-exps (`lse`) are float32, or float64 for float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

SHORT_KEYS = 256
# These private CPU kernels are behind the public function, which does not return the log-sum-exp.
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Batch:
    """Responses that are computed together: a map between their places `part` of N and G rows of R."""

    part: slice  # a part of N
    place_GR: torch.Tensor  # index into the part; 0 where padded
    is_padded_GR: torch.Tensor
    real: torch.Tensor  # index into G * R, for each place of the part

    @classmethod
    def of(cls, start: int, lengths: Sequence[int], device: torch.device) -> "Batch":
        lengths_G1 = torch.tensor(lengths, device=device)[:, None]
        steps_1R = torch.arange(max(lengths), device=device)[None]
        is_padded_GR = steps_1R >= lengths_G1
        place_GR = (lengths_G1.cumsum(0) - lengths_G1 + steps_1R).masked_fill_(is_padded_GR, 0)
        real = (~is_padded_GR).flatten().nonzero().squeeze(1)
        return cls(slice(start, start + sum(lengths)), place_GR, is_padded_GR, real)

    def pad(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pad the part's places of [H, N, ...] to [G, H, R, ...]."""
        rows = tensor[:, self.part]
        if len(self.place_GR) == 1:
            return rows[None]
        return torch.unflatten(rows.index_select(1, self.place_GR.flatten()), 1, self.place_GR.shape).transpose(0, 1)

    def unpad(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the real places of [G, H, R, ...] as [H, places of the part, ...]."""
        if len(tensor) == 1:
            return tensor[0]
        return tensor.transpose(0, 1).flatten(1, 2).index_select(1, self.real)


def plan_batches(lengths: Sequence[int], device: torch.device) -> tuple[Batch, ...]:
    """Batch neighbours that are short, where calls cost more than padding. A long response is a batch by itself."""
    batches, start = list[Batch](), 0
    for is_long, run in groupby(lengths, lambda length: length > SHORT_KEYS):
        neighbours = list(run)
        for members in [[length] for length in neighbours] if is_long else [neighbours]:
            if any(members):
                batches.append(Batch.of(start, members, device))
            start += sum(members)
    return tuple(batches)


@dataclass(frozen=True)
class Call:
    """A call of the kernel: its inputs [B, H, T, D], in the dtype that it computes in."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool
    scale: float | None

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and its log-sum-exp."""
        out, lse = flash(self.query, self.key, self.value, 0.0, self.is_causal, scale=self.scale)
        return out, lse

    def gradients(self, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of the inputs, from the output's; `out` and `lse` may be those of more keys."""
        query, key, value, dtype = self.query, self.key, self.value, self.query.dtype
        grad, out = grad.to(dtype), out.to(dtype)
        return list(flash_backward(grad, query, key, value, out, lse, 0.0, self.is_causal, scale=self.scale))


@dataclass(frozen=True)
class Inputs:
    """The queries, keys and values of responses, and the keys and values of their prompt."""

    query_HND: torch.Tensor
    key_KND: torch.Tensor
    value_KND: torch.Tensor
    prompt_key_KPD: torch.Tensor
    prompt_value_KPD: torch.Tensor

    def over_prompt(self, scale: float | None) -> Call:
        num_keys, length = self.prompt_key_KPD.shape[:2]
        dtype = kernel_dtype(self.query_HND.dtype, length)
        key, value = (tensor.to(dtype)[None] for tensor in (self.prompt_key_KPD, self.prompt_value_KPD))
        return Call(as_rows(self.query_HND.to(dtype), num_keys), key, value, is_causal=False, scale=scale)

    def over_own(self, batch: Batch, scale: float | None) -> Call:
        dtype, num_heads = kernel_dtype(self.query_HND.dtype, batch.place_GR.shape[1]), len(self.query_HND)
        tensors = (batch.pad(tensor.to(dtype)) for tensor in (self.query_HND, self.key_KND, self.value_KND))
        query, key, value = (for_query_heads(tensor, num_heads) for tensor in tensors)
        return Call(query, key, value, is_causal=True, scale=scale)


def attend(inputs: Inputs, batches: Sequence[Batch], scale: float | None) -> torch.Tensor:
    """Return the output [H, N, D], with gradients for the inputs."""
    output: torch.Tensor = ResponseAttention.apply(*vars(inputs).values(), batches, scale)
    return output


class ResponseAttention(torch.autograd.Function):
    """A function (query [H, N, D], own key, value [K, N, D], the prompt's [K, P, D], batches, scale) -> [H, N, D]."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> torch.Tensor:
        *tensors, batches, scale = arguments
        out_HND, lse_HN = attend_responses(Inputs(*tensors), batches, scale)
        ctx.save_for_backward(*tensors, out_HND, lse_HN)
        ctx.batches, ctx.scale = batches, scale
        return out_HND

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        *tensors, out_HND, lse_HN = ctx.saved_tensors
        gradients = response_gradients(Inputs(*tensors), grads[0], out_HND, lse_HN, ctx.batches, ctx.scale)
        return *(tensor.to(out_HND.dtype) for tensor in gradients), None, None


def attend_responses(
    inputs: Inputs, batches: Sequence[Batch], scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [H, N, D] and the log-sum-exp [H, N] over the prompt and the own keys."""
    query_HND = inputs.query_HND
    prompt_out, prompt_lse = inputs.over_prompt(scale).attend()
    prompt_lse = prompt_lse.reshape(query_HND.shape[:2])
    results = [map(batch.unpad, inputs.over_own(batch, scale).attend()) for batch in batches]
    own_out, own_lse = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
    lse_HN = torch.logaddexp(prompt_lse, own_lse)
    prompt_out = prompt_out.reshape(query_HND.shape) * (prompt_lse - lse_HN).exp_()[..., None]
    own_out = own_out * (own_lse - lse_HN).exp_()[..., None]
    return prompt_out.add_(own_out).to(query_HND.dtype), lse_HN


def response_gradients(
    inputs: Inputs,
    grad_HND: torch.Tensor,
    out_HND: torch.Tensor,
    lse_HN: torch.Tensor,
    batches: Sequence[Batch],
    scale: float | None,
) -> list[torch.Tensor]:
    """Return the gradients of the inputs, from that of the output, in the dtypes of the kernels."""
    num_keys = len(inputs.key_KND)
    grad, out, lse = (as_rows(tensor, num_keys) for tensor in (grad_HND, out_HND, lse_HN))
    grad_query, *grad_prompt = inputs.over_prompt(scale).gradients(grad, out, lse)

    results = []
    for batch in batches:
        # An infinite lse makes a padded row's probabilities zero, and with them the gradients that it passes on.
        lse = batch.pad(lse_HN).masked_fill_(batch.is_padded_GR[:, None], float("inf"))
        gradients = inputs.over_own(batch, scale).gradients(batch.pad(grad_HND), batch.pad(out_HND), lse)
        results.append(map(batch.unpad, gradients))
    own_query, *grad_own = (torch.cat(parts, dim=1) for parts in zip(*results, strict=True))
    grad_query = grad_query.reshape(inputs.query_HND.shape) + own_query
    grad_own = [tensor.unflatten(0, (num_keys, -1)).sum(1) for tensor in grad_own]
    return [grad_query, *grad_own, *(tensor[0] for tensor in grad_prompt)]


def as_rows(tensor: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Reshape [H, N, ...] to [1, K, H / K * N, ...]: query heads that share a key head become rows of it."""
    return torch.unflatten(tensor, 0, (num_keys, -1)).flatten(1, 2)[None]


def for_query_heads(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat each key head for the query heads that share it: [..., K, N, D] -> [..., H, N, D]."""
    shared = num_heads // tensor.shape[-3]
    return tensor if shared == 1 else tensor.repeat_interleave(shared, dim=-3)


def kernel_dtype(dtype: torch.dtype, num_keys: int) -> torch.dtype:
    """Choose float32 over bfloat16 for few keys: there the CPU kernel is two to five times as fast, on many slower."""
    return torch.float32 if dtype == torch.bfloat16 and num_keys <= SHORT_KEYS else dtype
