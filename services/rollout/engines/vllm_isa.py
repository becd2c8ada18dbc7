"""A vLLM platform plug-in that names no platform: it makes vLLM choose its CPU kernels within the limits that PyTorch
and oneDNN are given (onbeat/machine/processor.py). vLLM itself looks at the processor only, and would compute with
AVX-512 kernels beside a PyTorch that was told to stay with AVX2.

It is an entry point of `vllm.platform_plugins`, because those are called in each process before kernels are loaded.
"""

import os

from onbeat.machine.processor import NO_AMX, NO_AVX512, NO_BFLOAT16, is_limited

HIDDEN_PROBES = (
    (NO_AVX512, ("_is_avx512_supported", "_is_vnni_supported")),
    (NO_BFLOAT16, ("_is_avx512_bf16_supported",)),
    (NO_AMX, ("_is_amx_tile_supported", "_is_amx_fp16_supported")),
)


def register() -> None:
    hidden = [probe for limits, probes in HIDDEN_PROBES if is_limited(os.environ, limits) for probe in probes]
    if not hidden:
        return
    import torch

    for probe in hidden:
        setattr(torch.cpu, probe, is_forbidden)


def is_forbidden() -> bool:
    return False
