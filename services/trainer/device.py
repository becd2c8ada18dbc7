"""Device-specific behaviour of the trainer. The device is selected in `services.device`."""

import functools
import os

import torch

from onbeat.machine.cores import cpu_quota, divide, physical_cores, run_on_cores

# Backends of torch.distributed, by the type of the ranks' devices: tensors on the host go over gloo.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def device_of_rank(device: torch.device, local_rank: int) -> torch.device:
    """Make one accelerator per rank of this machine current and return it. Raises ValueError if there are too few."""
    if device.type == "cpu":
        return device
    accelerator = torch.get_device_module(device)
    if local_rank >= accelerator.device_count():
        raise ValueError(
            f"local rank {local_rank} has no {device.type} device: {accelerator.device_count()} are visible; start at "
            f"most as many ranks on this machine (torchrun --nproc-per-node), or check {VISIBLE_DEVICES[device.type]}"
        )
    accelerator.set_device(local_rank)
    return torch.device(device.type, local_rank)


def make_deterministic(device: torch.device) -> None:
    """Let CUDA add in a fixed order, so that a repeated iteration has the same bits. By default, for one, the backward
    pass of `index_select` adds in any order."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def give_back_cache(device: torch.device) -> None:
    """Give a card's memory back that PyTorch keeps for the next job: an engine on the same card counts what is free."""
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def has_fused_adamw(device: torch.device) -> bool:
    """Return whether torch's fused AdamW is used. torch_npu 2.13 has one too; it is off until tried on an NPU."""
    return device.type in ("cpu", "cuda")


@functools.cache
def first_cores() -> list[int]:
    """Return the hardware threads that this process had when it was first asked, as it gives some of them up."""
    return sorted(os.sched_getaffinity(0))


def pin_cores(cores: str, local_rank: int = 0, local_size: int = 1) -> int:
    """Run on the given cores (`0-3,6`; empty: all) with one thread each; ranks of a machine divide them up.

    Raises ValueError if none of the given cores may be used. Returns the number of threads. With more ranks than cores,
    each has one thread and cores are shared. A container may have many cores but a limit of few CPUs: that limit then
    bounds the threads.
    """
    given = run_on_cores(cores) if cores else physical_cores(first_cores())
    rank_cores = divide(given, local_size)[local_rank]
    os.sched_setaffinity(0, rank_cores)
    num_threads = max(1, int(min(len(rank_cores), cpu_quota() / local_size)))
    torch.set_num_threads(num_threads)
    return num_threads
