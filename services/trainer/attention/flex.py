"""Shared-prompt attention by FlexAttention, for CUDA: one compiled kernel that skips blocks where nothing is visible.

The row is padded to whole blocks. So the kernel sees few lengths, and never uses the variant for fewer queries than a
block, which refuses head groups that are not a power of two. Padding places see each other and the prefix only. On
the CPU the forward pass runs too (but no backward pass), so it can be tested without a GPU.

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
PADDING, PREFIX = -1, -2  # instead of the index of a group


@dataclass(frozen=True)
class FlexPlan:
    block_mask: BlockMask
    num_padding: int

    def attend(
        self, query_BHTD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return the attention output [B, T, H, D]."""
        padded = (
            torch.nn.functional.pad(tensor, (0, 0, 0, self.num_padding))
            for tensor in (query_BHTD, key_BKTD, value_BKTD)
        )
        is_grouped = query_BHTD.shape[1] != key_BKTD.shape[1]
        attend = compiled(flex_attention) if query_BHTD.is_cuda else flex_attention
        attended_BHTD = attend(*padded, block_mask=self.block_mask, scale=scale, enable_gqa=is_grouped)
        return attended_BHTD[:, :, : query_BHTD.shape[2]].transpose(1, 2)


def plan_flex(layout: PackedLayout) -> FlexPlan:
    """Build the block mask, once per micro-batch."""
    device = layout.position_ids.device
    num_padding = -layout.num_places % BLOCK
    length = layout.num_places + num_padding
    group_T, segment_T = (ids.to(device) for ids in label_places(layout, num_padding))

    def is_visible(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        on_prompt_or_own = (segment_T[key] == 0) | (segment_T[key] == segment_T[query])
        in_group = (group_T[query] == group_T[key]) & on_prompt_or_own
        return (in_group | (group_T[key] == PREFIX)) & (key <= query)

    create = compiled(create_block_mask) if device.type == "cuda" else create_block_mask  # uncompiled it fills T x T
    mask = create(is_visible, None, None, length, length, device, BLOCK)
    return FlexPlan(mask, num_padding)


def label_places(layout: PackedLayout, num_padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each place its group (or PREFIX, PADDING) and segment (0: the prompt, i: the i-th response), both [T].

    One group with a prompt of 2, responses of 3 and 2 tokens (2 and 1 inputs), and 3 places of padding:
    groups 0 0 0 0 0 -1 -1 -1, segments 0 0 1 1 2 0 0 0.
    """
    runs = [
        (index, segment, length)
        for index, group in enumerate(layout.groups)
        for segment, length in enumerate((group.prompt_length, *group.response_lengths))
    ]
    groups, segments, lengths = torch.tensor([(PREFIX, 0, layout.prefix_length), *runs, (PADDING, 0, num_padding)]).T
    return groups.repeat_interleave(lengths), segments.repeat_interleave(lengths)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
