"""Shared-prompt attention by Ascend's fused kernel, in one call for the whole row.

It is written against the documentation of `torch_npu.npu_fusion_attention` (torch_npu 2.13) and has not run on the
hardware yet. (Before a job packs rows, `passes/choice.py` compares the device's attention with a dense mask there.)

The row is taken as sequences of unequal length (layout TND). Queries stay where they are; keys are gathered:

    sequence   F     P       R1       R2       | P' ...
    queries    F     P       R1       R2       | P' ...       the row itself
    keys       F     F P     F P R1   F P R2   | F P' ...     rightDownCausal: the last query sees all keys

A segment of a response that forks is such a sequence, too: its keys are those of all of its ancestors and its own.

Legend: H query heads, K key/value heads, T places, S gathered keys, D head size.
"""

from dataclasses import dataclass

import torch

from services.trainer.attention.layout import PackedLayout

RIGHT_DOWN_CAUSAL = 3  # sparse_mode
MASK_SIZE = 2048  # side of the compressed mask that this mode requires, whatever the lengths
MAX_SEQUENCES = 1024


@dataclass(frozen=True)
class NpuPlan:
    key_index_S: torch.Tensor
    query_ends: list[int]  # places, cumulative
    key_ends: list[int]  # gathered keys, cumulative
    mask: torch.Tensor  # bool, true where hidden

    def attend(
        self, query_HTD: torch.Tensor, key_KTD: torch.Tensor, value_KTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        query_THD = query_HTD.transpose(0, 1).contiguous()
        key_SKD, value_SKD = (
            tensor.transpose(0, 1).index_select(0, self.key_index_S) for tensor in (key_KTD, value_KTD)
        )
        import torch_npu  # the device is an NPU, so `services.device` has imported it

        outputs = torch_npu.npu_fusion_attention(
            query_THD,
            key_SKD,
            value_SKD,
            query_THD.shape[1],
            "TND",
            atten_mask=self.mask,
            scale=query_THD.shape[2] ** -0.5 if scale is None else scale,
            actual_seq_qlen=self.query_ends,
            actual_seq_kvlen=self.key_ends,
            sparse_mode=RIGHT_DOWN_CAUSAL,
        )
        attended_THD: torch.Tensor = outputs[0]
        return attended_THD


def plan_npu(layout: PackedLayout) -> NpuPlan:
    """Build indices and mask, once per micro-batch. Raises ValueError for more sequences than the kernel takes."""
    device = layout.position_ids.device
    query_ends, keys = [], []
    for index, segment in enumerate(layout.segments):
        if segment.length > 0:
            query_ends.append(segment.end)
            keys.append(torch.cat([torch.arange(part.start, part.end) for part in (*layout.path(index), segment)]))
    if len(query_ends) > MAX_SEQUENCES:
        raise ValueError(
            f"{len(query_ends)} prompts and responses in a micro-batch, but the fused attention takes "
            f"{MAX_SEQUENCES}; lower training.max_tokens_per_micro_batch"
        )
    key_ends = torch.tensor([len(key) for key in keys]).cumsum(0).tolist()
    mask = torch.ones(MASK_SIZE, MASK_SIZE, dtype=torch.bool, device=device).triu(1)
    return NpuPlan(torch.cat(keys).to(device), query_ends, key_ends, mask)
