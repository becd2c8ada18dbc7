"""Forward and backward of one group: its prompt once, against varlen sequences, against a row for each response.

    packed     the prompt, then all responses, by FlexAttention: what the trainer does
    varlen     each prompt + response as a sequence of one row without padding, by PyTorch's FlashAttention
    rows       the same sequences as rows of a batch (equal lengths: no padding), by transformers' SDPA attention

Random weights in bfloat16, gradient checkpointing everywhere. MFU counts the operations of `groups.counted_operations`
(what is computed again not) over the dense bfloat16 peak of the card by its data sheet. On a CPU: forward only.
"""

import gc
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.attention.varlen import varlen_attn

from onbeat.streams.codec import RolloutGroup
from services.trainer.attention import AttentionPlan
from services.trainer.attention.flex import plan_flex
from services.trainer.batch import MicroBatch, Part, pack
from services.trainer.model import logprobs as output_head
from services.trainer.model.logprobs import TargetLogprobs
from services.trainer.model.model import PACKED_ATTENTION, use_attention

from .groups import counted_operations, make_group, one_by_one
from .models import random_model
from .part import Findings, Place, run_part

SHAPES = [(512, 512, 8), (1024, 256, 16), (2048, 1024, 8)]  # tokens of prompt and response, responses
TINY_SHAPES = [(100, 30, 3)]
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # operations a second
LOGPROB_GAP = 0.1  # nats on average: bfloat16 noise of 28 layers
HAS_GROUPED_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters
REPETITIONS = {"tiny": 1, "1.5B": 3, "7B": 1}  # repetitions after one that is not counted


@dataclass(frozen=True)
class VarlenPlan:
    """A plan in which each sequence of the row attends to itself, causally."""

    ends: torch.Tensor  # [S + 1] int32, cumulative
    longest: int

    def attend(
        self, query_HTD: torch.Tensor, key_KTD: torch.Tensor, value_KTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        query, key, value = (tensor.transpose(0, 1) for tensor in (query_HTD, key_KTD, value_KTD))
        options: dict[str, Any] = {"enable_gqa": True}
        if not HAS_GROUPED_HEADS:  # PyTorch 2.11: each query head gets a key head of its own
            times = len(query_HTD) // len(key_KTD)
            key, value, options = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), {}
        ends, longest = self.ends, self.longest
        options |= {"scale": scale, "window_size": (-1, 0)}
        attended_THD = varlen_attn(query, key, value, ends, ends, longest, longest, **options)
        assert isinstance(attended_THD, torch.Tensor)  # nothing else was asked for
        return attended_THD


def packed(model: Any, group: RolloutGroup, device: torch.device) -> torch.Tensor:
    batch = pack([group], device)
    return row_logprobs(model, batch, plan_flex(batch.layout))


def varlen(model: Any, group: RolloutGroup, device: torch.device) -> torch.Tensor:
    parts = [Part(group, (member,)) for member in range(len(group.responses))]
    batch = pack(parts, device, is_prefix_shared=False)
    ends = torch.tensor([0, *(span.end for span in batch.layout.groups)], dtype=torch.int32, device=device)
    return row_logprobs(model, batch, VarlenPlan(ends, int(ends.diff().max())))


def row_logprobs(model: Any, batch: MicroBatch, plan: AttentionPlan) -> torch.Tensor:
    row = {"input_ids": batch.token_ids[None], "position_ids": batch.layout.position_ids[None]}
    hidden = model.get_decoder()(**row, layout_plan=plan, use_cache=False).last_hidden_state[0]
    hidden = hidden.index_select(0, batch.layout.logit_index)
    weight = model.get_output_embeddings().weight
    logprobs: torch.Tensor = TargetLogprobs.apply(hidden, weight, batch.target_ids, 1.0)[0]
    return logprobs


WAYS = {"packed": packed, "varlen": varlen, "rows": one_by_one}


def measure(place: Place, findings: Findings) -> None:
    peak = None
    if place.is_tiny:
        findings.leave_out("varlen attention needs a CUDA device, and FlexAttention's backward pass too")
    else:
        name = torch.cuda.get_device_name()
        peak = next((operations for part, operations in PEAKS.items() if part in name), None)
        findings.figure("peak assumed", card=name, operations_per_s=peak, grouped_varlen_heads=HAS_GROUPED_HEADS)
    for size in ("tiny",) if place.is_tiny else ("1.5B", "7B"):
        try:
            model = random_model(size, place.device, torch.bfloat16)
            time_head(size, model, place, findings)
            for shape in TINY_SHAPES if place.is_tiny else SHAPES:
                compare(size, model, shape, peak, place, findings)
            del model
            gc.collect()  # only this frees a model that is wrapped for checkpointing
        except torch.OutOfMemoryError as error:
            findings.leave_out(f"the {size} model's larger shapes do not fit into the card's free memory: {error}")


def time_head(size: str, model: Any, place: Place, findings: Findings) -> None:
    """Time the output head by the number of float32 rows of logits that it makes at a time: 16 suit a CPU's cache."""
    weight = model.get_output_embeddings().weight
    num_tokens = 32 if place.is_tiny else 4096
    hidden = torch.randn(num_tokens, weight.shape[1], device=place.device).bfloat16().requires_grad_()
    targets = torch.zeros(num_tokens, dtype=torch.int64, device=place.device)

    def run() -> None:
        TargetLogprobs.apply(hidden, weight, targets, 1.0)[0].sum().backward()

    seconds = {}
    for num_rows in (16, 128, 1024):
        with patch.multiple(output_head, ROWS=num_rows, ROWS_ON_DEVICE=num_rows):
            seconds[f"rows_{num_rows}_s"] = place.seconds(run, REPETITIONS[size])
    model.zero_grad(set_to_none=True)
    findings.figure(f"{size}, output head, {num_tokens} tokens", **seconds)


def compare(
    size: str, model: Any, shape: tuple[int, int, int], peak: float | None, place: Place, findings: Findings
) -> None:
    group, seconds, logprobs = make_group(*shape), {}, {}
    separate, together = counted_operations(model, group)
    title = f"{size}, prompt, response, group {shape}"
    for way, run in WAYS.items():
        if way == "varlen" and place.is_tiny:
            continue
        use_attention(model, "sdpa" if way == "rows" else PACKED_ATTENTION)
        with torch.no_grad():
            logprobs[way] = run(model, group, place.device)
        place.reset_peak()
        train = partial(forward_and_backward, model, run, group, place)
        seconds[way] = place.seconds(train, REPETITIONS[size])
        operations = 3 * (together if way == "packed" else separate)
        mfu = operations / seconds[way] / peak if peak else None
        findings.figure(f"{title}, {way}", seconds=seconds[way], mfu=mfu, peak_gib=place.peak_gib())
    for way in seconds.keys() - {"packed"}:
        gap = (logprobs["packed"] - logprobs[way]).abs().mean().item()
        ratio = {"times_faster": seconds[way] / seconds["packed"], "counted": separate / together}
        findings.check(f"{title}, packed has the logprobs of {way}", gap <= LOGPROB_GAP, mean_gap=gap, **ratio)


def forward_and_backward(model: Any, run: Callable[..., torch.Tensor], group: RolloutGroup, place: Place) -> None:
    with torch.set_grad_enabled(not place.is_tiny):
        logprobs = run(model, group, place.device)
    if not place.is_tiny:
        logprobs.sum().backward()
    model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    run_part(measure)
