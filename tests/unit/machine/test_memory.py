"""Memory: what a machine has, and what the doctor says when it is short."""

import pytest

from onbeat.contracts.records import HostMemory, TrainerRecord, WorkerRecord
from onbeat.machine.memory import read_memory
from services.broker.doctor.memory import MAX_FINDINGS, explain_memory


@pytest.mark.parametrize(
    ("limit", "use", "unlimited", "files"),
    [
        ("max", "current", "max\n", ""),
        ("limit_in_bytes", "usage_in_bytes", "9223372036854771712\n", "total_"),  # older control groups
    ],
)
def test_container_has_what_its_limit_leaves(tmp_path, limit, use, unlimited, files):
    meminfo = (
        "MemTotal:       24000000 kB\nMemFree:         100 kB\nMemAvailable:   10000000 kB\nHugePages_Total:       0\n"
    )
    (tmp_path / "meminfo").write_text(meminfo)
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


def test_doctor_names_a_machine_without_memory_once():
    def trainer(name: str, host: str, free_gb: float, state: str = "training") -> TrainerRecord:
        memory = HostMemory(name=host, available_bytes=int(free_gb * 1e9), total_bytes=24_000_000_000)
        return TrainerRecord(id=name, state=state, last_seen_at=100.0, host=memory)

    worker = WorkerRecord(id="rollout-0", state="idle", last_seen_at=99.0, host=trainer("x", "box", 0.3).host)
    old = WorkerRecord(id="rollout-1", state="idle", last_seen_at=99.0)  # a record of an earlier version
    fine, ended = trainer("trainer-1", "other", 5.0), trainer("trainer-2", "gone", 0.1, "stopped")
    (finding,) = explain_memory([trainer("trainer-0", "box", 0.9), worker, old, fine, ended], now=101.0)
    assert finding.is_problem
    assert "box has 0.3 of 24.0 GB of memory left, so trainer-0, rollout-0 may become very slow" in finding.sentence
    assert explain_memory([worker], now=200.0) == []  # silent: the doctor says that already
    many = [trainer(f"trainer-{index}", f"box-{index}", index / 100) for index in range(50)]
    assert len(explain_memory(many, now=100.0)) == MAX_FINDINGS
