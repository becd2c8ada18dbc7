"""Shared-prompt attention by FlexAttention, for CUDA: one compiled kernel that skips blocks where nothing is visible.

The row is padded to whole blocks, two at least. So the kernel sees few lengths, and never uses the variant for fewer
queries than a block, which refuses head groups that are not a power of two. Padding places see each other and the
prefix only. On the CPU the forward pass runs too (but no backward pass), so it can be tested without a GPU.

PyTorch compiles anew, which takes about ten seconds, for a second length (then for all lengths), for a single block and
for other strides. `passes/warm_up.py` has two lengths compiled before training begins. A single block and other strides
never come: rows have two blocks at least, and tensors are made contiguous.

Segments lie in pre-order, so those that may see a segment follow it in one run, which ends at `leave`. One mask
function serves all layouts: a query sees a key if key <= query < leave of the key.

Legend: B = 1 row, H query heads, K key/value heads, T places, D head size.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from services.trainer.attention.layout import PackedLayout

BLOCK = 128  # places
MIN_PLACES = 2 * BLOCK


@dataclass(frozen=True)
class FlexPlan:
    block_mask: BlockMask
    num_padding: int

    def attend(
        self, query_HTD: torch.Tensor, key_KTD: torch.Tensor, value_KTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        padding = (0, 0, 0, self.num_padding)
        inputs = (query_HTD[None], key_KTD[None], value_KTD[None])
        query, key, value = (torch.nn.functional.pad(tensor, padding).contiguous() for tensor in inputs)
        is_grouped = len(query_HTD) != len(key_KTD)
        attend: Callable[..., Any] = flex_attention
        if query_HTD.is_cuda:
            attend = compiled(attend)
        attended_BHTD: torch.Tensor = attend(
            query, key, value, block_mask=self.block_mask, scale=scale, enable_gqa=is_grouped
        )
        return attended_BHTD.squeeze(0)[:, : query_HTD.shape[1]].transpose(0, 1)


def plan_flex(layout: PackedLayout) -> FlexPlan:
    """Build the block mask, once per micro-batch."""
    device = layout.position_ids.device
    num_padding = max(MIN_PLACES - layout.num_places, -layout.num_places % BLOCK)
    length = layout.num_places + num_padding
    leave_T = leave_places(layout, num_padding).to(device)

    def is_visible(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < leave_T[key])

    create = compiled(create_block_mask) if device.type == "cuda" else create_block_mask  # uncompiled it fills T x T
    mask = create(is_visible, None, None, length, length, device, BLOCK)
    return FlexPlan(mask, num_padding)


def leave_places(layout: PackedLayout, num_padding: int) -> torch.Tensor:
    """Return for each place, [T], where the run of places ends that may see it: that of its segment and descendants.

    One group with a prompt of 2, responses of 3 and 2 tokens (2 and 1 inputs), and 3 places of padding:
    5 5 4 4 5 8 8 8.
    """
    length = layout.num_places + num_padding
    ends = [segment.end for segment in layout.segments]
    for index, segment in reversed(list(enumerate(layout.segments))):
        if segment.parent >= 0:
            ends[segment.parent] = max(ends[segment.parent], ends[index])
    if layout.prefix_length:
        ends[0] = length  # so that padding sees it
    lengths = [segment.length for segment in layout.segments]
    return torch.tensor([*ends, length]).repeat_interleave(torch.tensor([*lengths, num_padding]))


@functools.cache
def compiled(function: Callable[..., Any], backend: str | Callable[..., Any] = "inductor") -> Callable[..., Any]:
    """Return the function, compiled anew for each model and for some lengths, as often as PyTorch allows.

    Beyond that it raises FailOnRecompileLimitHit: PyTorch's default is to go on uncompiled, with T x T scores.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(function, backend=backend)


def forget_compiled() -> None:
    """Drop everything that was compiled for the model before; a process that trains job after job calls it for each."""
    torch._dynamo.reset()
