"""Memory: what a machine has, what the doctor and `onbeat run` say when it is short."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onbeat.cli import plan
from onbeat.cli.options import Broker
from onbeat.config import JobConfig
from onbeat.local.stack import StackOptions
from onbeat.local.state import StackLock, StackState, held_bytes
from onbeat.memory import read_memory
from onbeat.types import HostMemory, JobRecord, TrainerRecord, WorkerRecord
from services.broker.doctor.memory import MAX_FINDINGS, explain_memory

# Linux cuts the name after 15 bytes, here in the middle of a letter.
NAMED_BY_HALF_A_LETTER = """
from pathlib import Path
Path("/proc/self/comm").write_text("x" * 14 + "\\u044f")
print("named", flush=True)
input()
"""

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
MEMINFO = (
    "MemTotal:       24000000 kB\nMemFree:         100 kB\nMemAvailable:   10000000 kB\nHugePages_Total:       0\n"
)


@pytest.mark.parametrize(
    ("limit", "use", "unlimited", "files"),
    [
        ("max", "current", "max\n", ""),
        ("limit_in_bytes", "usage_in_bytes", "9223372036854771712\n", "total_"),  # older control groups
    ],
)
def test_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, use: str, unlimited: str, files: str) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    machine = read_memory(tmp_path / "meminfo", tmp_path)
    assert (machine.available_bytes, machine.total_bytes) == (10_240_000_000, 24_576_000_000)
    folder = tmp_path / "memory" if files else tmp_path
    folder.mkdir(exist_ok=True)
    for name, text in {limit: "4000\n", use: "3000\n", "stat": f"anon 1500\n{files}inactive_file 1500\n"}.items():
        (folder / f"memory.{name}").write_text(text)
    limited = read_memory(tmp_path / "meminfo", tmp_path)
    assert (limited.available_bytes, limited.total_bytes) == (2500, 4000)
    (folder / f"memory.{limit}").write_text(unlimited)
    assert read_memory(tmp_path / "meminfo", tmp_path) == machine
    assert read_memory().available_bytes > 0


def trainer(name: str, host: str, free_gb: float, state: str = "training") -> TrainerRecord:
    memory = HostMemory(name=host, available_bytes=int(free_gb * 1e9), total_bytes=24_000_000_000)
    return TrainerRecord(id=name, state=state, last_seen_at=100.0, host=memory)


def test_doctor_names_a_machine_without_memory_once() -> None:
    worker = WorkerRecord(id="rollout-0", state="idle", last_seen_at=99.0, host=trainer("x", "box", 0.3).host)
    old = WorkerRecord(id="rollout-1", state="idle", last_seen_at=99.0)  # of an earlier version
    fine, ended = trainer("trainer-1", "other", 5.0), trainer("trainer-2", "gone", 0.1, "stopped")
    (finding,) = explain_memory([trainer("trainer-0", "box", 0.9), worker, old, fine, ended], now=101.0)
    assert finding.is_problem
    assert "box has 0.3 of 24.0 GB of memory left, so trainer-0, rollout-0 may become very slow" in finding.sentence
    assert explain_memory([worker], now=200.0) == []  # silent: the doctor says that already
    many = [trainer(f"trainer-{index}", f"box-{index}", index / 100) for index in range(50)]
    assert len(explain_memory(many, now=100.0)) == MAX_FINDINGS


NEEDS = {"trainer": {"weights": 4_000_000_000}, "engine core": {"cache": 1_500_000_000}}


@pytest.fixture
def planned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "plan_memory", lambda *_, **__: NEEDS)
    monkeypatch.setattr("threading.Thread.start", lambda thread: thread.run())
    monkeypatch.setattr("threading.Thread.is_alive", lambda _: False)
    monkeypatch.setattr("onbeat.hardware.accelerators.available_devices", lambda _: ("", []))


@pytest.mark.usefixtures("planned_at_once")
def test_run_warns_when_the_job_takes_more_than_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    config = JobConfig.from_file(QUICKSTART, ["model.path=/a/model"])
    for free_gb, num_warnings in ((100, 0), (6, 1)):
        free = trainer("x", "box", free_gb).host
        monkeypatch.setattr("onbeat.memory.read_memory", lambda free=free: free)
        with plan.memory_warning(config, StackOptions(tmp_path, num_rollouts=2), said.append):
            pass
        assert len(said) == num_warnings
    assert "may take 7.3 GB (trainer 4.0, engine core 3.0), and 6.0 GB were free" in said[0]
    assert plan.shortage_text(NEEDS, 1, 100_000_000_000) == ""


@pytest.mark.usefixtures("planned_at_once")
def test_job_of_a_running_stack_is_compared_without_the_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = JobConfig.from_file(QUICKSTART, ["model.path=/a/model"]).model_dump(mode="json")
    counts = {"num_iterations": 3, "next_iteration": 0, "policy_version": 0}
    job = JobRecord(id="job-1", name="j", pool="default", state="PENDING", created_at=1.0, config=config, **counts)
    monkeypatch.setattr("onbeat.memory.read_memory", lambda: trainer("x", "box", 6).host)
    lock = StackLock(tmp_path)
    lock.write(StackState(os.getpid(), "up", "http://here", "redis://r", 1.0, num_rollouts=2, engine="vllm"))
    named = subprocess.Popen(
        [sys.executable, "-c", NAMED_BY_HALF_A_LETTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    named.stdout.readline()
    own = held_bytes(os.getpid())
    assert own > 10_000_000
    named.communicate()
    cases = (
        (job, None, 2_000_000_000, 0),
        (job, None, 1_000_000_000, 1),
        (job, "http://here", 0, 1),
        (job, "http://elsewhere", 0, 0),
        (job.model_copy(update={"next_iteration": 1}), None, 0, 0),
    )
    for record, url, held, num_warnings in cases:
        said: list[str] = []
        monkeypatch.setattr("onbeat.local.state.held_bytes", lambda _, held=held: held)
        with plan.job_memory_warning(record, Broker(url, None, tmp_path), said.append):
            assert len(said) == num_warnings
    lock.release()
    with plan.job_memory_warning(job, Broker(None, None, tmp_path), pytest.fail):  # it is not this folder's
        pass


def test_plan_ends_with_the_run_that_it_is_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("onbeat.hardware.accelerators.available_devices", lambda _: ("", []))
    config = JobConfig.from_file(QUICKSTART, ["model.path=/a/model"])
    with plan.memory_warning(config, StackOptions(tmp_path), pytest.fail):
        deadline = time.monotonic() + 30
        while not plan.CHILDREN and time.monotonic() < deadline:
            time.sleep(0.01)
        (child,) = plan.CHILDREN
    assert child.returncode == -signal.SIGKILL
    assert plan.CHILDREN == []


def test_bundled_model_is_not_converted_for_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ONBEAT_CACHE_DIR", str(tmp_path))
    assert not plan.is_converted("bundled:tiny")
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    assert plan.is_converted("bundled:tiny")
    assert plan.is_converted("/a/model")
