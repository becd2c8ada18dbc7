"""Freed memory of a process goes back to the system on request, whatever its allocator was configured to keep."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.contracts.records import HostMemory
from onbeat.machine import malloc
from onbeat.machine.malloc import KEEP_FREED
from onbeat.process.children import ChildProcess
from services.rollout.engines.vllm_platform import engine_environment

pytestmark = pytest.mark.slow

FREE_TENSORS = """
import sys
from pathlib import Path
import torch
from onbeat.machine.malloc import give_back_freed, give_back_large_at_once

def held_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

if sys.argv[1] == "at once":
    give_back_large_at_once()
before = held_mib()
tensors = [torch.ones(1 << 20) for _ in range(200)]  # 4 MiB each
if sys.argv[1] == "at once":
    del tensors[::2]
else:
    del tensors[:199]  # the last one lies above what is free
    give_back_freed()
print(held_mib() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
@pytest.mark.parametrize(("when", "kept_mib"), [("at once", range(350, 500)), ("when asked", range(-50, 250))])
def test_freed_tensors_below_kept_ones_are_given_back(when: str, kept_mib: range):
    environment = os.environ | {"GLIBC_TUNABLES": KEEP_FREED}
    command = [sys.executable, "-c", FREE_TENSORS, when]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) in kept_mib


@pytest.mark.parametrize(("available", "is_given_back"), [(33, True), (34, False)])
def test_freed_memory_is_kept_where_there_is_plenty(monkeypatch, available: int, is_given_back: bool):
    calls: list[bool] = []
    memory = HostMemory(name="box", available_bytes=available, total_bytes=100)
    monkeypatch.setattr(malloc, "read_memory", lambda: memory)
    monkeypatch.setattr(malloc, "give_back_freed", lambda: calls.append(True))
    malloc.give_back_if_scarce()
    assert calls == [True] * is_given_back


FREE_ALL = """
import os
from pathlib import Path

def held_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

assert "HF_HUB_OFFLINE" not in os.environ
assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # an empty variable says something, too
before = held_mib()
blocks = [bytearray(1 << 24) for _ in range(10)]  # 16 MiB each
del blocks
print(held_mib() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
async def test_child_gets_no_settings_of_the_engine_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "free_all.py").write_text(FREE_ALL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("onbeat.process.children.WAS_OFFLINE", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in engine_environment("cpu", {}).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    child = await ChildProcess.start("the child", "free_all")
    try:
        assert int(await child.receive(30)) < 20
    finally:
        await child.kill()
