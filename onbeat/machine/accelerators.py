"""The split of accelerators between rollouts and trainer, by variables and device files: no driver is asked.

The first device is the trainer's, which is one process; the rollouts share the rest. A single device is shared by all.
"""

import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from onbeat.machine.cores import available_cores

# The order is that of ONBEAT_DEVICE=auto. Values: the variable that makes devices visible, the names of their files.
KINDS = {
    "cuda": ("CUDA_VISIBLE_DEVICES", re.compile(r"nvidia\d+")),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES", re.compile(r"davinci\d+")),
}
MEMORY = "ONBEAT_GPU_MEMORY_UTILIZATION"
# The shares of a device's memory for all its rollouts together. The first, without the trainer, is a rollout's default.
ROLLOUTS_MEMORY, BESIDE_TRAINER_MEMORY = 0.85, 0.4


def available_devices(environment: Mapping[str, str], files: Path = Path("/dev")) -> tuple[str, list[str]]:
    """Return the variable that chooses among the visible devices, and their names in it; "" and none without devices.

    Files are counted, because drivers count: a container's only device is number 0, whatever its file is called.
    """
    wanted = environment.get("ONBEAT_DEVICE", "auto")
    for kind, (variable, file_name) in KINDS.items():
        if wanted not in ("auto", kind) or ((wanted, kind) == ("auto", "cuda") and not may_use_cuda()):
            continue
        if variable in environment:
            names = parse_devices(environment[variable])
        else:
            num_files = sum(file_name.fullmatch(path.name) is not None for path in files.glob("*"))
            names = [str(number) for number in range(num_files)]
        if names:
            return variable, names
    return "", []


def devices_of_this_process(kind: str, environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Return what this process computes on: `cuda 1`, ... or, without an accelerator, the cores that the calling thread
    may use: `core 0`, ... None for accelerators that no variable names.
    """
    if kind not in KINDS:
        return [f"core {core}" for core in available_cores()]
    names = parse_devices(environment.get(KINDS[kind][0], ""))
    return [f"{kind} {name}" for name in names] or None


def may_use_cuda() -> bool:
    """Return whether the installed PyTorch is no build for CPUs, with which NPUs are used. It is not imported."""
    try:
        return not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return True


def parse_devices(text: str) -> list[str]:
    """Parse devices: `2,GPU-8932f937` -> ["2", "GPU-8932f937"]. The first invalid name ends the list: `-1` is none."""
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        if not name.isdecimal() and not name.startswith(("GPU-", "MIG-")):
            break
        names.append(name)
    return names


def rollout_devices(devices: Sequence[str], num_rollouts: int, per_rollout: int = 1) -> list[list[str]]:
    """Return `per_rollout` devices for each rollout, in turn when there are too few; surplus devices stay idle.

    >>> rollout_devices(["0", "1", "2"], num_rollouts=3)
    [['1'], ['2'], ['1']]
    """
    rest = devices[1:] if len(devices) > per_rollout else devices
    num_places = max(1, len(rest) // per_rollout)
    places = [list(rest[place * per_rollout : (place + 1) * per_rollout]) for place in range(num_places)]
    return [places[rollout % num_places] for rollout in range(num_rollouts)]


def device_environments(
    environment: Mapping[str, str], num_rollouts: int, files: Path = Path("/dev")
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the additions to the environment of the trainer and of each rollout; empty without devices."""
    variable, devices = available_devices(environment, files)
    if not devices:
        return {}, [{} for _ in range(num_rollouts)]
    size = environment.get("ONBEAT_TENSOR_PARALLEL_SIZE", "1")  # the rollouts report a wrong value, and end
    rollouts = rollout_devices(devices, num_rollouts, per_rollout=max(1, int(size)) if size.isdecimal() else 1)
    additions = [{variable: ",".join(devices_of_rollout)} for devices_of_rollout in rollouts]
    for visible, added in zip(rollouts, additions, strict=True):
        num_sharing = max(sum(device in others for others in rollouts) for device in visible)
        share = (BESIDE_TRAINER_MEMORY if devices[0] in visible else ROLLOUTS_MEMORY) / num_sharing
        if MEMORY not in environment and share < ROLLOUTS_MEMORY:
            added[MEMORY] = f"{share:.3g}"
    return {variable: devices[0]}, additions
