"""vLLM itself calls what `vllm_kernels` registers. In a process of its own, because it stays registered."""

import subprocess
import sys

CALLS = """
import torch
from vllm import ir
from services.rollout import vllm_kernels
from services.rollout.cpu_sampling import sample

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
