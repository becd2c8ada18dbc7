"""The accelerator of trainer and rollout behind one interface: cpu, cuda, npu. Errors name what is missing, and the
remedy.
"""

import logging
from typing import Any

from onbeat.machine.processor import Bfloat16, Hardware, read_processor

try:
    import torch
except RuntimeError as error:  # while it is imported, torch loads the back ends that are installed: torch_npu
    raise ImportError(
        f"{error} ({error.__cause__}) Source CANN's set_env.sh; or, to use another device, set that variable"
    ) from error

logger = logging.getLogger(__name__)

DEVICES = ("cpu", "cuda", "npu")
BFLOAT16_CAPABILITY = 8  # major compute capability of CUDA devices: Ampere


class NotInstalled(ValueError):
    """The software for this device is not there."""


class NotUsable(ValueError):
    """The software is there, but the driver, or the device, is not."""


def choose_device(name: str) -> torch.device:
    """Return the named device. `auto` takes the best that is there, and warns of one that is set up but not usable.

    Raises ValueError when the named one is not usable.
    """
    if name not in ("auto", *DEVICES):
        raise ValueError(f"ONBEAT_DEVICE={name}: expected auto, cpu, cuda or npu")
    if name == "auto":
        return torch.device(next((device for device in ("cuda", "npu") if is_usable(device)), "cpu"))
    try:
        check_device(name)
    except ValueError as error:
        raise type(error)(f"ONBEAT_DEVICE={name}, but {error}; or use cpu") from error
    return torch.device(name)


def is_usable(device: str) -> bool:
    try:
        check_device(device)
    except NotInstalled:
        return False
    except NotUsable as error:
        logger.warning("ONBEAT_DEVICE=auto does not take %s: %s", device, error)
        return False
    return True


def check_device(device: str) -> None:
    """Check that the device is usable. Raises NotInstalled or NotUsable, with the remedy."""
    if device == "cuda":
        check_cuda()
    elif device == "npu":
        check_npu()


def check_cuda() -> None:
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        raise NotInstalled(f"PyTorch {torch.__version__} is built without CUDA; install requirements/cuda.lock")
    raise NotUsable(
        "PyTorch sees no CUDA device; check the driver with nvidia-smi, check CUDA_VISIBLE_DEVICES, and start a "
        "container with its GPUs (docker run --gpus all)"
    )


def check_npu() -> None:
    load_torch_npu()
    if not torch.npu.is_available():  # type: ignore[attr-defined]
        raise NotUsable(
            "torch_npu sees no device; check the driver with npu-smi info, check ASCEND_RT_VISIBLE_DEVICES, and start "
            "a container with /dev/davinci*, /dev/davinci_manager, /dev/devmm_svm and /dev/hisi_hdc"
        )


def describe_device(device: torch.device) -> Hardware:
    """Return what the device is and whether it multiplies in bfloat16."""
    if device.type == "cpu":
        return read_processor()
    if device.type == "npu":
        return Hardware(torch.npu.get_device_name(), "Ascend", "native")  # type: ignore[attr-defined]
    major, minor = torch.cuda.get_device_capability(device)
    # vLLM refuses bfloat16 below this compute capability.
    bfloat16: Bfloat16 = "native" if major >= BFLOAT16_CAPABILITY else "missing"
    return Hardware(torch.cuda.get_device_name(device), f"compute capability {major}.{minor}", bfloat16)


def load_torch_npu() -> Any:
    """Import torch_npu, which registers `torch.npu` and the hccl backend. Raises NotInstalled or NotUsable."""
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch_npu":
            raise NotInstalled("torch_npu is not installed; docs/platforms.md says which one to install") from error
        raise NotUsable(
            f"torch_npu cannot be imported ({error}); source CANN's set_env.sh, and use the torch_npu that matches "
            f"PyTorch {torch.__version__} and your CANN"
        ) from error
    return torch_npu
