"""What the trainer does differently by device; which one it is, `services.device` says."""

import os

import torch

from onbeat.local.cores import cpu_quota, divide, parse_cores

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}  # host tensors go over gloo
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


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
            f"most as many ranks on this machine (torchrun --nproc-per-node), or check {VISIBLE_DEVICES[device.type]}"
        )
    accelerator.set_device(local_rank)
    return torch.device(device.type, local_rank)


def has_fused_adamw(device: torch.device) -> bool:
    """Torch's own one-kernel AdamW. torch_npu 2.13 has one too; off until it was tried on an NPU."""
    return device.type in ("cpu", "cuda")


def pin_cores(cores: str, local_rank: int = 0, local_size: int = 1) -> int:
    """Run on the given cores (`0-3,6`; empty: all it has) with one thread each; ranks of a machine share them out.

    Returns the number of threads. More ranks than cores: one thread each, cores shared. A container may have many
    cores and a limit of few CPUs: then as many threads as that.
    """
    own = divide(parse_cores(cores) if cores else sorted(os.sched_getaffinity(0)), local_size)[local_rank]
    os.sched_setaffinity(0, own)
    num_threads = max(1, int(min(len(own), cpu_quota() / local_size)))
    torch.set_num_threads(num_threads)
    return num_threads
