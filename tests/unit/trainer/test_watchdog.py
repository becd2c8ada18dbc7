"""A trainer whose main thread is stuck below Python ends, wherever it is stuck; one that gets on does not."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from services.trainer.job import watchdog as watchdog_module
from services.trainer.job.watchdog import Watchdog, stall_limit_s

pytestmark = pytest.mark.slow

LIMIT_S = 3.0  # a pause of this process, or of one that it starts, is shorter

SCRIPT = """
import ctypes, threading, time
from services.trainer.job.watchdog import Watchdog

def stuck_step():
    {stuck}

watchdog = Watchdog(limit_s={limit_s})
for _ in range({num_steps}):
    time.sleep({limit_s} / 8)
    watchdog.progress()
{then}
"""


def run(num_steps: int, then: str, stuck: str = "pass") -> "subprocess.CompletedProcess[str]":
    script = SCRIPT.format(stuck=stuck, then=then, limit_s=LIMIT_S, num_steps=num_steps)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "stuck",
    [
        pytest.param("ctypes.PyDLL(None).sleep(60)", id="with the lock of the interpreter"),
        pytest.param("ctypes.CDLL(None).sleep(60)", id="without it"),
        pytest.param("lock = threading.Lock(); lock.acquire(); lock.acquire()", id="in a lock of Python"),
    ],
)
def test_stuck_main_thread_ends_the_process_and_shows_where(stuck: str) -> None:
    started = time.monotonic()
    ended = run(1, "stuck_step()", stuck)
    assert time.monotonic() - started > LIMIT_S, "not before its limit"
    assert ended.returncode == 1
    assert "in stuck_step" in ended.stderr


def test_progressing_and_unwatched_idle_trainers_are_not_killed() -> None:
    ended = run(16, f"watchdog.close(); time.sleep({LIMIT_S + 0.5}); print('alive')")  # works for twice the limit
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\n", "")


def test_warning_comes_once_for_each_silence_and_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    expected = "no progress for 55 s while at the barrier: this process ends in 5 s (ONBEAT_STALL_S)"
    watchdog = Watchdog(limit_s=60.0)
    try:
        for _ in range(2):
            assert watchdog.warning("at the barrier") == ""
            now_s += 53.0
            assert watchdog.warning("at the barrier") == ""
            now_s += 2.0
            assert watchdog.warning("at the barrier").startswith(expected)
            assert watchdog.warning("at the barrier") == ""
            watchdog.progress()
    finally:
        watchdog.close()


def test_limit_is_below_the_jobs_deadline_unless_it_is_set() -> None:
    assert stall_limit_s(0.0, 1800.0) == 1440.0
    assert stall_limit_s(3000.0, 1800.0) == 3000.0
