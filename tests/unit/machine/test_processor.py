"""Instructions of a processor, below the limits that PyTorch is given."""

import subprocess
import sys

import pytest
import torch

from onbeat.machine.processor import read_processor
from services.rollout.engines import vllm_isa

pytestmark = pytest.mark.slow

FLAGS = {
    "laptop": "fma avx2 avx_vnni",
    "skylake": "fma avx2 avx512f avx512bw avx512_vnni",
    "zen4": "fma avx2 avx512f avx512bw avx512_bf16",
    "sapphire": "fma avx2 avx512f avx512bw avx512_bf16 amx_bf16 amx_tile",
}


def processor(tmp_path, flags, **environment):
    file = tmp_path / "cpuinfo"
    core = f"processor : 0\nmodel name : A Processor\nflags : fpu {flags}\n"
    file.write_text(f"{core}\n{core.replace('A Processor', 'Another')}")
    return read_processor(environment, file)


@pytest.mark.parametrize(
    ("flags", "instructions", "bfloat16"),
    [
        ("laptop", "AVX2, no bfloat16", "emulated"),
        ("skylake", "AVX-512 without bfloat16", "emulated"),
        ("zen4", "AVX-512 with bfloat16", "native"),
        ("sapphire", "AVX-512 and AMX with bfloat16", "native"),
    ],
)
def test_processors_differ_in_bfloat16(tmp_path, flags, instructions, bfloat16):
    read = processor(tmp_path, FLAGS[flags])
    assert (read.instructions, read.bfloat16) == (instructions, bfloat16)
    assert str(read) == f"A Processor ({instructions})"


@pytest.mark.parametrize(
    ("environment", "instructions"),
    [
        ({"ATEN_CPU_CAPABILITY": "avx2"}, "AVX2, no bfloat16"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX2"}, "AVX2, no bfloat16"),
        ({"ONEDNN_MAX_CPU_ISA": "avx2"}, "AVX2, no bfloat16"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}, "AVX-512 without bfloat16"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "AVX-512 with bfloat16"),
        ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"}, "AVX-512 and AMX with bfloat16"),
        ({"ATEN_CPU_CAPABILITY": "avx512"}, "AVX-512 and AMX with bfloat16"),
    ],
)
def test_limits_of_pytorch_hide_newer_instructions(tmp_path, environment, instructions):
    assert processor(tmp_path, FLAGS["sapphire"], **environment).instructions == instructions


def test_other_processors_need_their_flag_for_bfloat16(tmp_path):
    for features, bfloat16 in (("fp asimd", "emulated"), ("fp asimd bf16 sve", "native")):
        (tmp_path / "arm").write_text(f"processor\t: 0\nFeatures\t: {features}\n")
        assert read_processor({}, tmp_path / "arm").bfloat16 == bfloat16
    assert read_processor({}, tmp_path / "missing").bfloat16 == "emulated"


def test_this_processor_is_as_pytorch_sees_it():
    question = "import torch; print(torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_avx512_supported())"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True).stdout.split()
    read = read_processor({})
    assert [str(read.bfloat16 == "native"), str("AVX-512" in read.instructions)] == answer


@pytest.mark.parametrize(
    ("limit", "num_kept"), [("AVX2", 0), ("AVX512_CORE", 2), ("AVX512_CORE_BF16", 3), ("AVX512_CORE_AMX", 5)]
)
def test_vllm_chooses_its_kernels_below_the_limits(monkeypatch, limit, num_kept):
    """Let PyTorch see a processor that has everything."""
    names = ("avx512", "vnni", "avx512_bf16", "amx_tile", "amx_fp16")
    probes = [f"_is_{name}_supported" for name in names]
    for probe in probes:
        monkeypatch.setattr(torch.cpu, probe, lambda: True)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    vllm_isa.register()
    kept = [name for name, probe in zip(names, probes, strict=True) if getattr(torch.cpu, probe)()]
    assert kept == list(names[:num_kept])
