"""The kernels for vLLM on a CPU: vLLM's own RMS norm, which it calls on GPUs only (one call in place of ten, for every
layer), and the sampler of `cpu_sampling` in place of its Gumbel-max.
"""

import logging

import torch
from torch import library
from vllm import ir
from vllm.platforms import current_platform

from services.rollout.engines.cpu_sampling import sample
from services.rollout.engines.vllm_platform import CPU_KERNELS

logger = logging.getLogger(__name__)

SAMPLER = "fused_gumbel_argmax"  # (logits [B, V] float32, seeds [B]) -> tokens [B]


def register() -> None:
    """Register the kernels in a vLLM process; the engine's arguments (`ir_op_priority`) prefer them."""
    if not current_platform.is_cpu() or CPU_KERNELS in ir.ops.rms_norm.impls:
        return
    current_platform.import_kernels()
    ir.ops.rms_norm.register_impl(CPU_KERNELS, supports_args=is_plain)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(CPU_KERNELS, supports_args=is_plain_sum, inplace=True)(fused_add_rms_norm)
    if hasattr(torch.ops._C, SAMPLER):
        library.impl(f"_C::{SAMPLER}", "CPU", sample)
    else:
        logger.warning("this vLLM has no %s on the CPU: tokens are drawn by its own sampler", SAMPLER)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    output = torch.empty_like(x)
    torch.ops._C.rms_norm(output, x, weight, epsilon)
    return output


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def is_plain(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.is_contiguous()


def is_plain_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return is_plain(x, weight, epsilon, variance_size) and x_residual.is_contiguous()
