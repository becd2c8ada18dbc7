"""Choice of a device, and messages when it does not exist. Accelerators are stood in for: nothing runs on one."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from services import device as device_module
from services.device import NotInstalled, NotUsable, choose_device
from services.trainer.device import device_of_rank, give_back_cache, has_fused_adamw
from services.trainer.model import optimizer
from tests.trainer_fixtures import gap, job_config, recorded_iterations, train

pytestmark = pytest.mark.slow


class Accelerator:
    """As much of `torch.cuda` or `torch.npu` as is asked."""

    def __init__(self, num_devices):
        self.num_devices, self.current = num_devices, None

    def is_available(self):
        return self.num_devices > 0

    def device_count(self):
        return self.num_devices

    def set_device(self, index):
        self.current = index


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch):
    """PyTorch for the CPU, no torch_npu."""
    set_cuda(monkeypatch, None, 0)
    monkeypatch.setitem(sys.modules, "torch_npu", None)


def set_cuda(monkeypatch, built_with, num_devices):
    accelerator = Accelerator(num_devices)
    monkeypatch.setattr(torch.version, "cuda", built_with)
    for name in ("is_available", "device_count", "set_device"):
        monkeypatch.setattr(torch.cuda, name, getattr(accelerator, name))
    return accelerator


def set_npu(monkeypatch, num_devices):
    """torch_npu can be imported. It does not name the device: that would stay so for other tests. See `on_npus`."""
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace())
    monkeypatch.setattr(torch, "npu", Accelerator(num_devices), raising=False)


TORCH_NPU = """
import torch
current = None

def is_available():
    return True

def device_count():
    return 2

def set_device(index):
    global current
    current = index

import sys
torch.utils.rename_privateuse1_backend("npu")
torch._register_device_module("npu", sys.modules[__name__])
"""


def on_npus(folder, code):
    """Return the output of the code in a new process, where a stand-in for torch_npu registers two devices."""
    (folder / "torch_npu.py").write_text(TORCH_NPU)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def write_torch_npu(folder, source, monkeypatch):
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "torch_npu")


@pytest.mark.parametrize("name", ["tpu", "", "CUDA", "cuda:0"])
def test_unknown_name_is_refused(name):
    with pytest.raises(ValueError, match="expected auto, cpu, cuda or npu"):
        choose_device(name)


@pytest.mark.parametrize(("num_gpus", "num_npus", "chosen"), [(0, 0, "cpu"), (2, 0, "cuda"), (1, 1, "cuda")])
def test_auto_takes_the_best_and_a_name_what_it_says(monkeypatch, num_gpus, num_npus, chosen):
    set_cuda(monkeypatch, "13.0", num_gpus)
    set_npu(monkeypatch, num_npus)
    assert choose_device("auto") == choose_device(chosen) == torch.device(chosen)
    monkeypatch.setattr(device_module, "load_torch_npu", lambda: pytest.fail("torch_npu was imported"))
    assert choose_device("cpu") == torch.device("cpu")


CHOOSE_NPU = """
from services.device import choose_device
from services.trainer.device import device_of_rank

print(choose_device("auto"), choose_device("npu"), choose_device("cpu"))
device = choose_device("npu")
print(device_of_rank(device, 1))
import torch
print(torch.npu.current)
try:
    device_of_rank(device, 2)
except ValueError as error:
    print(error)
"""


def test_npus_are_chosen_and_one_given_to_each_rank(tmp_path):
    chosen, ranks, current, error = on_npus(tmp_path, CHOOSE_NPU).splitlines()
    assert chosen == "npu npu cpu"
    assert ranks == "npu:1"
    assert current == "1"
    assert error.startswith("local rank 2 has no npu device: 2 are visible;")
    assert error.endswith("check ASCEND_RT_VISIBLE_DEVICES")


def test_missing_software_or_device_says_what_to_do(monkeypatch):
    with pytest.raises(NotInstalled, match=r"ONBEAT_DEVICE=cuda, but .* built without CUDA; install .*cuda\.lock"):
        choose_device("cuda")
    with pytest.raises(NotInstalled, match=r"ONBEAT_DEVICE=npu, but torch_npu is not installed; docs/platforms\.md"):
        choose_device("npu")
    set_cuda(monkeypatch, "13.0", 0)
    set_npu(monkeypatch, 0)
    with pytest.raises(NotUsable, match=r"nvidia-smi.*CUDA_VISIBLE_DEVICES.*--gpus"):
        choose_device("cuda")
    with pytest.raises(NotUsable, match=r"npu-smi.*ASCEND_RT_VISIBLE_DEVICES.*davinci"):
        choose_device("npu")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('libascend_hal.so: cannot open shared object file')", "libascend_hal.so"),
        ("raise RuntimeError('CANN 8.0 is too old')", "CANN 8.0 is too old"),
        ("import yaml_that_is_not_there", "No module named 'yaml_that_is_not_there'"),
    ],
)
def test_broken_driver_is_reported_with_its_reason(monkeypatch, tmp_path, source, reason):
    write_torch_npu(tmp_path, source, monkeypatch)
    with pytest.raises(NotUsable, match=rf"torch_npu cannot be imported \({reason}.*\); source CANN's set_env\.sh"):
        choose_device("npu")


def test_auto_warns_of_what_is_set_up_but_does_not_work(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    assert choose_device("auto") == torch.device("cpu")
    assert caplog.messages == []
    set_cuda(monkeypatch, "13.0", 0)
    write_torch_npu(tmp_path, "raise ImportError('libhccl.so')", monkeypatch)
    assert choose_device("auto") == torch.device("cpu")
    assert [(record.levelname, record.message.split(":")[0]) for record in caplog.records] == [
        ("WARNING", "ONBEAT_DEVICE=auto does not take cuda"),
        ("WARNING", "ONBEAT_DEVICE=auto does not take npu"),
    ]


def test_only_an_accelerator_gives_its_cache_back(monkeypatch):
    given_back: list[str] = []

    def module_of(device):
        return SimpleNamespace(empty_cache=lambda: given_back.append(device.type))

    monkeypatch.setattr(torch, "get_device_module", module_of)
    for name in ("cpu", "cuda"):
        give_back_cache(torch.device(name))
    assert given_back == ["cuda"]


@pytest.mark.parametrize("service", ["services.trainer", "services.rollout"])
def test_service_says_why_torch_itself_cannot_be_imported(tmp_path, service):
    """PyTorch loads an installed torch_npu by itself: without CANN even `import torch` fails."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    metadata = tmp_path / "torch_npu-2.13.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-npu\nVersion: 2.13.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", service], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    remedy = "Source CANN's set_env.sh" if service == "services.trainer" else "docs/platforms.md says"
    printed = [line for line in ended.stderr.splitlines() if "Error" in line or "ERROR" in line]
    assert "libhccl.so: cannot open shared object file" in printed[-1]
    assert remedy in printed[-1]


def test_each_rank_takes_a_device_of_its_own(monkeypatch):
    cuda = set_cuda(monkeypatch, "13.0", 2)
    assert device_of_rank(torch.device("cpu"), 5) == torch.device("cpu")
    assert device_of_rank(torch.device("cuda"), 1) == torch.device("cuda", 1)
    assert cuda.current == 1
    with pytest.raises(ValueError, match=r"rank 2 has no cuda device: 2 are visible; .* CUDA_VISIBLE_DEVICES"):
        device_of_rank(torch.device("cuda"), 2)


def test_adamw_without_a_fused_kernel_takes_the_same_steps(tmp_path, monkeypatch):
    """Also when a checkpoint is loaded between them."""
    assert not has_fused_adamw(SimpleNamespace(type="npu"))  # type: ignore[arg-type]
    groups, half = recorded_iterations(), job_config(schedule={"num_iterations": 2})
    fused, _ = train(job_config(), groups, tmp_path / "fused")
    monkeypatch.setattr(optimizer, "has_fused_adamw", lambda device: False)
    train(half, groups[:8], tmp_path / "plain")
    plain, _ = train(job_config(), groups[8:], tmp_path / "plain", resume_from=2)
    assert gap(fused, plain).mean() < 1e-6
    assert gap(fused, plain).max() < 1e-3
