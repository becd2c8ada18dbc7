"""Shared-prompt attention in the signature of transformers' attention interface; `model.py` registers it there.

`layout` describes in integers which place sees which; `short`, `sdpa` and, where a response forks, `tree` (CPU), `flex`
(CUDA) compute the attention. Programs add the kernel of another device, such as `npu` (Ascend), to PLANNERS.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from services.trainer.attention.flex import forget_compiled, plan_flex
from services.trainer.attention.layout import PackedLayout, Tree, build_layout, dense_mask
from services.trainer.attention.sdpa import plan_sdpa
from services.trainer.attention.short import ShortPlan, is_short
from services.trainer.attention.tree import plan_tree

__all__ = [
    "PackedLayout",
    "Tree",
    "build_layout",
    "dense_mask",
    "forget_compiled",
    "no_mask",
    "packed_attention",
    "plan_attention",
]


class AttentionPlan(Protocol):
    """The data that a kernel prepares once per micro-batch and uses in every layer."""

    def attend(
        self, query_HTD: torch.Tensor, key_KTD: torch.Tensor, value_KTD: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Return the attention output [T, H, D]."""


def plan_cpu(layout: PackedLayout) -> AttentionPlan:
    if layout.has_forks:
        return plan_tree(layout)
    return ShortPlan(layout) if is_short(layout) else plan_sdpa(layout)


PLANNERS: dict[str, Callable[[PackedLayout], AttentionPlan]] = {"cpu": plan_cpu, "cuda": plan_flex}


def plan_attention(layout: PackedLayout) -> AttentionPlan:
    """Plan the attention on the device that holds the layout."""
    return PLANNERS[layout.position_ids.device.type](layout)


def packed_attention(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, in transformers' signature: query [1, H, T, D], key and value [1, K, T, D] -> ([1, T, H, D], None)."""
    assert layout_plan is not None, "this model attends by packed layouts; pass layout_plan"
    assert attention_mask is None, "packed rows take no mask: the plan says who sees whom"
    assert dropout == 0.0, "packed rows take no dropout"
    if kwargs.get("softcap") is not None:
        raise ValueError("attention logits are soft-capped, which packed rows do not do")
    assert query.shape[0] == 1, "the packed row is the batch"
    query_HTD, key_KTD, value_KTD = (tensor.squeeze(0) for tensor in (query, key, value))
    output_THD = layout_plan.attend(query_HTD, key_KTD, value_KTD, scaling)
    return output_THD.contiguous()[None], None  # some models view it as [T, H * D], and the others copy it anyway


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: the plan decides which place sees which, and a mask would be T x T."""
    return None
