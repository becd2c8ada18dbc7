"""The accelerator behind one interface: cpu, cuda, npu. The only file but the NPU attention that imports torch_npu."""

import os

import torch

from onbeat.local.cores import divide, parse_cores

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}  # host tensors go over gloo


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
        import torch_npu  # noqa: F401  registers torch.npu and the hccl backend
    except ImportError:
        return False
    return bool(torch.npu.is_available())  # type: ignore[attr-defined]


def backend_of(device: torch.device) -> str:
    """What torch.distributed speaks between ranks on such devices."""
    return BACKENDS[device.type]


def device_of_rank(device: torch.device, local_rank: int) -> torch.device:
    """One accelerator per rank of this machine, made current. Raises ValueError when there are too few."""
    if device.type == "cpu":
        return device
    accelerator = torch.get_device_module(device)
    if local_rank >= accelerator.device_count():
        raise ValueError(
            f"local rank {local_rank} has no {device.type} device: {accelerator.device_count()} are visible; start at "
            "most as many ranks on this machine (torchrun --nproc-per-node)"
        )
    accelerator.set_device(local_rank)
    return torch.device(device.type, local_rank)


def has_fused_adamw(device: torch.device) -> bool:
    """Torch's own one-kernel AdamW; torch_npu has none behind `fused=True`."""
    return device.type in ("cpu", "cuda")


def pin_cores(cores: str, local_rank: int = 0, local_size: int = 1) -> int:
    """Run on the given cores (`0-3,6`; empty: all it has) with one thread each; ranks of a machine share them out.

    Returns the number of threads. More ranks than cores: one thread each, cores shared.
    """
    own = divide(parse_cores(cores) if cores else sorted(os.sched_getaffinity(0)), local_size)[local_rank]
    os.sched_setaffinity(0, own)
    torch.set_num_threads(len(own))
    return len(own)
