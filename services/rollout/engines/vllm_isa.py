"""A vLLM platform plug-in that names no platform: it makes vLLM choose its CPU kernels within the limits that PyTorch
and oneDNN are given (onbeat/machine/processor.py). vLLM itself looks at the processor only, and would compute with
AVX-512 kernels beside a PyTorch that was told to stay with AVX2.

It is an entry point of `vllm.platform_plugins`, because those are called in each process before kernels are loaded.
"""

import os

from onbeat.machine.processor import NO_AVX512, NO_BFLOAT16, is_limited

AVX512_PROBES = ("_is_avx512_supported", "_is_vnni_supported")
BFLOAT16_PROBES = ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_amx_fp16_supported")


def register() -> None:
    has_no_avx512 = is_limited(os.environ, NO_AVX512)
    if not has_no_avx512 and not is_limited(os.environ, NO_BFLOAT16):
        return
    import torch

    for probe in BFLOAT16_PROBES + (AVX512_PROBES if has_no_avx512 else ()):
        setattr(torch.cpu, probe, is_forbidden)


def is_forbidden() -> bool:
    return False
