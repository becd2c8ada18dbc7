"""Shared-prompt attention in the signature of transformers' attention interface; `model.py` registers it there."""

from typing import Any

import torch

from services.trainer.attention.layout import PackedLayout, build_layout
from services.trainer.attention.sdpa import SdpaPlan, plan_sdpa, sdpa_attention

__all__ = ["PackedLayout", "build_layout", "no_mask", "packed_attention", "plan_attention"]


def plan_attention(layout: PackedLayout, dtype: torch.dtype) -> SdpaPlan:
    return plan_sdpa(layout)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout_plan: SdpaPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature: query [B, H, T, D], key and value [B, K, T, D] -> ([B, T, H, D], None)."""
    assert layout_plan is not None, "this model attends by packed layouts; pass layout_plan"
    assert attention_mask is None, "packed rows take no mask: the plan says who sees whom"
    assert dropout == 0.0, "packed rows take no dropout"
    if kwargs.get("softcap") is not None:
        raise ValueError("attention logits are soft-capped, which packed rows do not do")
    return sdpa_attention(query, key, value, layout_plan, scaling), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The plan says who sees whom; a mask would be T x T."""
    return None
