"""A report of versions and the device, as one line of JSON. `problems` are sentences: what is missing, what to do."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OLDEST_TORCH, OLDEST_TRANSFORMERS = (2, 11), (5, 0)


def describe() -> dict[str, Any]:
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    versions |= {package: version_of(package) for package in ("triton", "transformers")}
    problems = [
        problem_of("PyTorch", versions["torch"], OLDEST_TORCH),
        problem_of("transformers", versions["transformers"], OLDEST_TRANSFORMERS),
    ]
    if problem := device_problem(torch, versions):
        problems.append(f"{problem}: every part that can runs on the CPU, with tiny shapes")
        described: dict[str, Any] = {"device": "cpu"}
    else:
        described = {"device": "cuda", "card": describe_card(torch)}
    return {"versions": versions, "problems": [problem for problem in problems if problem]} | described


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def problem_of(name: str, version: str | None, oldest: tuple[int, int]) -> str:
    """
    >>> problem_of("PyTorch", "2.9.1+cu128", (2, 11))
    'PyTorch is 2.9.1+cu128, the check wants 2.11 or newer, so parts may fail: make gpu-check PYTHON=/path/to/python3'
    """
    if version is not None and tuple(map(int, version.split(".")[:2])) >= oldest:
        return ""
    wanted = ".".join(map(str, oldest))
    remedy = "so parts may fail: make gpu-check PYTHON=/path/to/python3"
    return f"{name} is {version or 'missing'}, the check wants {wanted} or newer, {remedy}"


def device_problem(torch: Any, versions: dict[str, str | None]) -> str:
    if not torch.cuda.is_available():
        return f"PyTorch {versions['torch']} " + (
            "sees no CUDA device" if versions["cuda"] else "is built without CUDA"
        )
    if torch.cuda.get_device_capability()[0] < 8:
        return f"{torch.cuda.get_device_name()} has no bfloat16 (compute capability below 8)"
    return "Triton, which compiles FlexAttention, is missing" if versions["triton"] is None else ""


def describe_card(torch: Any) -> dict[str, Any]:
    card = torch.cuda.get_device_properties(0)
    return {
        "name": card.name,
        "compute_capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "memory_gib": card.total_memory / 2**30,
        "free_gib": torch.cuda.mem_get_info()[0] / 2**30,
        "driver": driver_version(),
    }


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


if __name__ == "__main__":
    print(json.dumps(describe()))
