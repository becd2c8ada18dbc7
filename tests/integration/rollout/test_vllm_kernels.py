"""vLLM itself calls what `vllm_kernels` registers. In a process of its own, because it stays registered."""

import os
import subprocess
import sys

import pytest

from onbeat.machine.processor import read_processor

CALLS = """
import torch
from vllm import ir
from services.rollout.engines import vllm_kernels
from services.rollout.engines.cpu_sampling import sample

logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
seeds = torch.arange(64) * 12345
vllm_kernels.register()
vllm_kernels.register()  # vLLM calls plug-ins more than once
assert torch.equal(torch.ops._C.fused_gumbel_argmax(logits, seeds), sample(logits, seeds))
assert vllm_kernels.CPU_KERNELS in ir.ops.rms_norm.impls
assert vllm_kernels.CPU_KERNELS in ir.ops.fused_add_rms_norm.impls
"""


def test_vllm_draws_tokens_and_norms_by_the_registered_kernels() -> None:
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


KERNELS = """
import re
from vllm.platforms import current_platform

current_platform.import_kernels()
print(*{name for name in re.findall(r"/(_C\\w*)\\.abi3", open("/proc/self/maps").read())})
"""


@pytest.mark.parametrize(
    ("limit", "needed", "library"),
    [("AVX2", "", "_C_AVX2"), ("AVX512_CORE", "AVX-512", "_C_AVX512"), ("", "with bfloat16", "_C")],
)
def test_vllm_loads_the_kernels_that_the_limit_allows(limit, needed, library) -> None:
    if needed not in (instructions := read_processor({}).instructions):
        pytest.skip(f"this processor has {instructions}")
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": limit, "ATEN_CPU_CAPABILITY": ""}
    done = subprocess.run([sys.executable, "-c", KERNELS], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [library], done.stderr
