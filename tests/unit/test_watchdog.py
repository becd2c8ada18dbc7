"""A trainer whose main thread is stuck below Python ends, wherever it is stuck; one that gets on does not."""

import subprocess
import sys

import pytest

from services.trainer.watchdog import stall_limit_s

SCRIPT = """
import ctypes, threading, time
from services.trainer.watchdog import Watchdog

def stuck_step():
    {stuck}

watchdog = Watchdog(limit_s={limit_s})
for _ in range(8):
    time.sleep(0.25)  # twice the shortest limit in all
    watchdog.progress()
{then}
"""
STUCK = {
    "with the lock of the interpreter": "ctypes.PyDLL(None).sleep(60)",
    "without it": "ctypes.CDLL(None).sleep(60)",
    "in a lock of Python": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
}


def run(stuck: str, then: str, limit_s: float = 1.0) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", SCRIPT.format(stuck=stuck, then=then, limit_s=limit_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("where", STUCK)
def test_stuck_main_thread_ends_the_process_and_shows_where(where: str) -> None:
    ended = run(STUCK[where], "stuck_step()")
    assert ended.returncode == 1
    assert "in stuck_step" in ended.stderr


def test_closed_watchdog_lets_an_idle_trainer_live() -> None:
    ended = run("pass", "watchdog.close(); time.sleep(2.0); print('alive')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\n", "")


def test_warning_comes_once_for_each_silence_and_before_the_end() -> None:
    told = "print(watchdog.warning('at the barrier'))"
    script = f"{told}; time.sleep(2.75); {told}; {told}; watchdog.progress(); {told}; time.sleep(2.75); {told}"
    ended = run("pass", f"{script}; watchdog.close()", limit_s=3.0)
    quiet, warned, quiet_too, quiet_again, warned_again = ended.stdout.splitlines()
    assert (quiet, quiet_too, quiet_again) == ("", "", "")
    assert warned.startswith("no progress for 3 s while at the barrier: this process ends in 0 s (ONBEAT_STALL_S)")
    assert warned_again == warned


def test_limit_is_below_the_jobs_deadline_unless_it_is_set() -> None:
    assert stall_limit_s(0.0, 1800.0) == 1440.0
    assert stall_limit_s(3000.0, 1800.0) == 3000.0
