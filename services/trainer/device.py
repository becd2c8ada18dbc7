"""The accelerator behind one interface: cpu, cuda, npu."""

import os

import torch

from onbeat.local.cores import parse_cores


def choose_device(name: str) -> torch.device:
    """`auto` takes the best that is there. Raises ValueError when the asked one is not."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("npu" if has_npu() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("ONBEAT_DEVICE=cuda, but no CUDA device is visible; check the driver, or use cpu")
    if name == "npu" and not has_npu():
        raise ValueError("ONBEAT_DEVICE=npu, but torch_npu finds no device; check CANN and torch_npu, or use cpu")
    if name not in ("cpu", "cuda", "npu"):
        raise ValueError(f"ONBEAT_DEVICE={name}: expected auto, cpu, cuda or npu")
    return torch.device(name)


def has_npu() -> bool:
    try:
        import torch_npu  # noqa: F401  registers torch.npu
    except ImportError:
        return False
    return bool(torch.npu.is_available())  # type: ignore[attr-defined]


def pin_cores(cores: str) -> int:
    """Run this process on the given cores (`0-3,6`; empty: all it has) with one thread each. Returns their number."""
    if cores:
        os.sched_setaffinity(0, parse_cores(cores))
    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_cores)
    return num_cores
