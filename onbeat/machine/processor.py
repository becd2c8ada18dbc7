"""The bfloat16 support of a device, on which a job's dtype depends. This reads /proc/cpuinfo and imports no torch.

native     the device has instructions for bfloat16 products
emulated   it computes them by other means, many times slower than in float32
missing    its engine refuses bfloat16
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Bfloat16 = Literal["native", "emulated", "missing"]

CPUINFO = Path("/proc/cpuinfo")

# The variables limit PyTorch and oneDNN to the instructions of an older processor: see ISA in the Makefile. A limit
# that forbids AVX-512 forbids bfloat16, too, and one that forbids bfloat16 forbids AMX.
ATEN_LIMIT, ONEDNN_LIMIT = "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"
NO_AVX512 = {ATEN_LIMIT: {"DEFAULT", "AVX2"}, ONEDNN_LIMIT: {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"}}
NO_BFLOAT16 = NO_AVX512 | {ONEDNN_LIMIT: NO_AVX512[ONEDNN_LIMIT] | {"AVX512_CORE", "AVX512_CORE_VNNI"}}
LIMITS_WITH_BFLOAT16 = {"AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"}
NO_AMX = NO_BFLOAT16 | {ONEDNN_LIMIT: NO_BFLOAT16[ONEDNN_LIMIT] | LIMITS_WITH_BFLOAT16}
HIDDEN_FLAGS = ((NO_AVX512, ("avx512",)), (NO_BFLOAT16, ("avx512_bf16", "avx512_fp16")), (NO_AMX, ("amx",)))


@dataclass(frozen=True)
class Hardware:
    """One kind of device, for people and for the choice of a dtype."""

    name: str  # as the system names it
    instructions: str  # "AVX2", "compute capability 9.0", ...
    bfloat16: Bfloat16

    def __str__(self) -> str:
        return f"{self.name} ({self.instructions})"


def read_processor(environment: Mapping[str, str] = os.environ, cpuinfo: Path = CPUINFO) -> Hardware:
    """Return this machine's processor, without the instructions that PyTorch may not use."""
    fields = read_fields(cpuinfo)
    flags = allowed_flags(set(fields.get("flags", fields.get("Features", "")).split()), environment)
    name = fields.get("model name") or f"{platform.machine()} processor"
    instructions = name_instructions(flags)
    has_bfloat16 = bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    return Hardware(name, instructions, "native" if has_bfloat16 else "emulated")


def read_fields(cpuinfo: Path) -> dict[str, str]:
    """Return the fields of the first processor; none where the file does not exist."""
    try:
        first = cpuinfo.read_text("utf-8").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def allowed_flags(flags: set[str], environment: Mapping[str, str]) -> set[str]:
    """Leave out the instruction sets that the variables of PyTorch and oneDNN forbid."""
    hidden = [prefix for limits, prefixes in HIDDEN_FLAGS if is_limited(environment, limits) for prefix in prefixes]
    return {flag for flag in flags if not flag.startswith(tuple(hidden))}


def is_limited(environment: Mapping[str, str], limits: Mapping[str, set[str]]) -> bool:
    """Return whether a variable has one of those values; their case does not matter, to oneDNN neither."""
    return any(environment.get(variable, "").upper() in values for variable, values in limits.items())


def name_instructions(flags: set[str]) -> str:
    """Name the vector instructions among the flags.

    >>> name_instructions({"avx2", "avx512f", "avx512_bf16"})
    'AVX-512 with bfloat16'
    """
    if "amx_bf16" in flags:
        return "AVX-512 and AMX with bfloat16"
    if "avx512f" in flags:
        return "AVX-512 with bfloat16" if "avx512_bf16" in flags else "AVX-512 without bfloat16"
    if "avx2" in flags:
        return "AVX2, no bfloat16"
    if "asimd" in flags:
        return "Arm with bfloat16" if "bf16" in flags else "Arm without bfloat16"
    return "no vector instructions known to Onbeat"
