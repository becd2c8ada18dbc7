"""Tests of how accelerators are found and divided. Device files are empty files: nothing runs on a device."""

from pathlib import Path

import pytest

from onbeat.local.stack import SHARED_MAX_NUM_SEQS, SPLIT_MAX_NUM_SEQS, StackOptions, service_specs
from onbeat.machine import accelerators
from onbeat.machine.accelerators import (
    KINDS,
    available_devices,
    device_environments,
    devices_of_this_process,
    rollout_devices,
)
from onbeat.machine.cores import available_cores
from services.trainer.device import VISIBLE_DEVICES

CUDA, ASCEND, MEMORY = "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "ONBEAT_GPU_MEMORY_UTILIZATION"


@pytest.fixture(autouse=True)
def build_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "version", lambda package: "2.13.0")


def machine(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).touch()
    return folder


def test_variables_are_those_of_the_services() -> None:
    assert {kind: variable for kind, (variable, _) in KINDS.items()} == VISIBLE_DEVICES


def test_process_names_what_it_computes_on() -> None:
    assert devices_of_this_process("cuda", {CUDA: "2,GPU-8932f937"}) == ["cuda 2", "cuda GPU-8932f937"]
    assert devices_of_this_process("npu", {CUDA: "2"}) is None
    assert devices_of_this_process("cpu", {CUDA: "2"}) == [f"core {core}" for core in available_cores()]


# ---- which there are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "environment", "build", "devices"),
    [
        ("null nvidiactl nvidia-uvm davinci_manager nvidia0.old", {}, "", ("", [])),
        ("nvidia0 nvidia1 nvidia10 nvidiactl nvidia-uvm", {}, "", (CUDA, ["0", "1", "2"])),
        ("nvidia5", {}, "", (CUDA, ["0"])),  # a container's, of a larger machine
        ("davinci4 davinci5 davinci_manager devmm_svm", {}, "", (ASCEND, ["0", "1"])),
        # The user makes some visible. The first invalid name ends the list.
        ("nvidia0 nvidia1", {CUDA: "3, 1"}, "", (CUDA, ["3", "1"])),
        ("nvidia0", {CUDA: "GPU-8932f937,MIG-41b35f6c"}, "", (CUDA, ["GPU-8932f937", "MIG-41b35f6c"])),
        ("nvidia0", {CUDA: "0,-1,1"}, "", (CUDA, ["0"])),
        ("nvidia0", {CUDA: "NoDevFiles"}, "", ("", [])),
        # NPUs serve where no GPU is visible, or where ONBEAT_DEVICE asks for them.
        ("nvidia0 davinci0", {}, "", (CUDA, ["0"])),
        ("nvidia0 davinci0 davinci1", {CUDA: "", ASCEND: "1"}, "", (ASCEND, ["1"])),
        ("nvidia0 davinci0 davinci1", {"ONBEAT_DEVICE": "npu"}, "", (ASCEND, ["0", "1"])),
        ("nvidia0 davinci0", {"ONBEAT_DEVICE": "cpu"}, "", ("", [])),
        # Packages for CPUs leave GPUs alone, unless they are asked for, and NPUs not.
        ("nvidia0", {}, "+cpu", ("", [])),
        ("nvidia0", {"ONBEAT_DEVICE": "cuda"}, "+cpu", (CUDA, ["0"])),
        ("nvidia0 davinci0", {}, "+cpu", (ASCEND, ["0"])),
    ],
)
def test_visible_devices_are_counted_by_variable_and_files(tmp_path, monkeypatch, files, environment, build, devices):
    monkeypatch.setattr(accelerators, "version", lambda package: "2.13.0" + build)
    assert available_devices(environment, machine(tmp_path, *files.split())) == devices


# ---- who gets which --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "num_rollouts", "per_rollout", "rollouts"),
    [
        ("0", 1, 1, ["0"]),
        ("0", 3, 1, ["0", "0", "0"]),
        ("01", 1, 1, ["1"]),
        ("01", 2, 1, ["1", "1"]),
        ("75310", 1, 1, ["5"]),
        ("0123", 3, 1, ["1", "2", "3"]),
        ("0123", 5, 1, ["1", "2", "3", "1", "2"]),
        ("01234", 2, 2, ["12", "34"]),
        ("0123", 2, 2, ["12", "12"]),
        ("012", 1, 2, ["12"]),
        ("01", 1, 2, ["01"]),
        ("01", 1, 4, ["01"]),
    ],
)
def test_first_device_trains_and_the_rest_is_shared_out(devices, num_rollouts, per_rollout, rollouts):
    assert rollout_devices(list(devices), num_rollouts, per_rollout) == [list(names) for names in rollouts]


# ---- devices of the services -------------------------------------------------------------------------------


def test_memory_is_lowered_on_a_shared_device_unless_set_by_user(tmp_path: Path) -> None:
    files = machine(tmp_path, "davinci0")
    assert device_environments({}, 1, files) == ({ASCEND: "0"}, [{ASCEND: "0", MEMORY: "0.4"}])
    assert device_environments({}, 3, files)[1] == [{ASCEND: "0", MEMORY: "0.133"}] * 3
    assert device_environments({MEMORY: "0.6"}, 1, files)[1] == [{ASCEND: "0"}]
    files = machine(tmp_path, "nvidia0", "nvidia1", "nvidia2")
    assert [added.get(MEMORY) for added in device_environments({}, 3, files)[1]] == ["0.425", None, "0.425"]
    size = {"ONBEAT_TENSOR_PARALLEL_SIZE": "2"}
    assert [added.get(MEMORY) for added in device_environments(size, 2, files)[1]] == ["0.425", "0.425"]


@pytest.mark.parametrize(("size", "rollouts"), [("2", ["1,2", "3,4"]), ("two", ["1", "2"]), ("0", ["1", "2"])])
def test_rollout_gets_as_many_devices_as_hold_its_model(tmp_path: Path, size: str, rollouts: list[str]) -> None:
    files = machine(tmp_path, *(f"nvidia{number}" for number in range(5)))
    given = device_environments({"ONBEAT_TENSOR_PARALLEL_SIZE": size}, 2, files)[1]
    assert given == [{CUDA: names} for names in rollouts]


@pytest.mark.parametrize(
    ("visible", "trainer_sees", "rollouts_see", "memory"),
    [
        ("", None, [None, None], [None, None]),
        ("0", "0", ["0", "0"], ["0.2", "0.2"]),
        ("0,1", "0", ["1", "1"], ["0.425", "0.425"]),
        ("4,5,6,7", "4", ["5", "6"], [None, None]),
    ],
)
def test_trainer_and_rollouts_get_devices_of_their_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    visible: str,
    trainer_sees: str | None,
    rollouts_see: list[str | None],
    memory: list[str | None],
) -> None:
    for name in ("ONBEAT_DEVICE", MEMORY, "ONBEAT_TENSOR_PARALLEL_SIZE", "ONBEAT_MAX_NUM_SEQS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(CUDA, visible)
    monkeypatch.setenv(ASCEND, "")
    monkeypatch.setattr("onbeat.local.stack.available_cores", lambda: list(range(8)))
    broker, trainer, *rollouts = service_specs(StackOptions(tmp_path, num_rollouts=2), "redis://r", 8801)
    seen = [spec.env.get(CUDA) for spec in (broker, trainer, *rollouts)]
    assert seen == [None, trainer_sees, *rollouts_see]
    given = [spec.env.get(MEMORY) for spec in (broker, trainer, *rollouts)]
    assert given == [None, None, *memory]
    at_once = [spec.env["ONBEAT_MAX_NUM_SEQS"] for spec in rollouts]
    assert at_once == [SHARED_MAX_NUM_SEQS if trainer_sees else SPLIT_MAX_NUM_SEQS] * 2, "a device is made for many"
