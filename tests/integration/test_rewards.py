"""Rewards that misbehave, in real child processes: only the process dies, and only that response is failed."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.process import RewardError, RewardProcess, RewardRequest

REWARDS = '''
import os, sys, time
from pathlib import Path

def behave(response, context, **options):
    """Does what the response says."""
    if response == "hang":
        time.sleep(3600)
    if response == "spin":
        while True: pass
    if response == "eat":
        return len([bytes(1 << 20) for _ in range(10_000)])
    if response == "raise":
        raise KeyError("no such thing")
    if response == "crash":
        print("last words", file=sys.stderr, flush=True)
        os.abort()
    if response == "exit":
        sys.exit(3)
    if response == "nan":
        return float("nan")
    if response == "print":
        print('{"position": 0, "reward": 99.0, "parts": {}}', flush=True)
        os.write(1, b"garbage without an end")
        sys.stdin.read()
    if response == "once":
        marker = Path(context["marker"])
        if not marker.exists():
            marker.touch()
            os.abort()
    if response == "secrets":
        return float("ONBEAT_REDIS_URL" in os.environ)
    if response == "child":
        Path(context["marker"]).write_text(str(os.fork() or time.sleep(3600)))
        time.sleep(3600)
    return {"reward": 1.0, "length": len(response)}
'''


@pytest.fixture(autouse=True)
def installed_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pip install` would leave behind for a user's own reward, on the path of child processes."""
    site = tmp_path / "site"
    info = site / "onbeat_test_rewards-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: onbeat-test-rewards\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[onbeat.rewards]\nbehave = onbeat_test_rewards:behave\n")
    (site / "onbeat_test_rewards.py").write_text(REWARDS)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("ONBEAT_REDIS_URL", "redis://:secret@nowhere")


@pytest.fixture
async def pool():
    pool = RewardPool(num_processes=1)
    yield pool
    await pool.close()


def request(*responses: str, max_attempts: int = 1, timeout_s: float = 5.0, context: dict | None = None, **kwargs):
    defaults = {"name": "behave", "options": {}, "memory_limit_mb": 512}
    limits = {"timeout_s": timeout_s, "max_attempts": max_attempts}
    return RewardRequest(**(defaults | limits | kwargs), context=context or {}, responses=list(responses))


def idle_pid(pool: RewardPool) -> int:
    return pool._idle[0].pid


async def test_scores_come_back_in_order_with_their_parts(pool):
    scores = await pool.score(request("a", "bbb"))
    assert [(score.reward, score.parts) for score in scores] == [(1.0, {"length": 1.0}), (1.0, {"length": 3.0})]


async def test_process_stays_warm_and_later_groups_are_fast(pool):
    await pool.score(request("a"))
    pid, started = idle_pid(pool), time.monotonic()
    for _ in range(20):
        await pool.score(request("a"))
    assert idle_pid(pool) == pid
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("behaviour", ["hang", "spin"])
async def test_hanging_reward_is_killed_in_time_and_replaced(pool, behaviour):
    await pool.score(request("a"))
    pid, started = idle_pid(pool), time.monotonic()
    with pytest.raises(RewardError, match=r"response 1: timeout: scoring took longer than 0.3 s"):
        await pool.score(request("a", behaviour, timeout_s=0.3))
    assert time.monotonic() - started < 1.5
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert (await pool.score(request("a")))[0].reward == 1.0


async def test_timeout_is_per_response_not_per_group(pool):
    await pool.score(request("a"))
    started = time.monotonic()
    with pytest.raises(RewardError, match="response 2"):
        await pool.score(request("a", "b", "hang", timeout_s=0.5))
    assert 0.4 < time.monotonic() - started < 1.5


async def test_memory_hog_hits_its_limit_and_is_replaced(pool):
    with pytest.raises(RewardError, match="memory: the memory limit") as caught:
        await pool.score(request("eat", memory_limit_mb=256))
    assert caught.value.kind == "memory"
    assert not pool._idle
    assert (await pool.score(request("a")))[0].reward == 1.0


async def test_garbage_on_stdout_does_not_reach_the_protocol(pool):
    scores = await pool.score(request("print", "a"))
    assert [score.reward for score in scores] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("behaviour", "kind", "words"),
    [
        ("nan", "invalid", "nan, not a finite number"),
        ("raise", "raised", "KeyError: 'no such thing'"),
        ("crash", "crashed", "SIGABRT"),
        ("crash", "crashed", "last words|Aborted"),
        ("exit", "crashed", "exited with code 3"),
    ],
)
async def test_broken_reward_is_an_error_with_its_reason_never_a_zero(pool, behaviour, kind, words):
    with pytest.raises(RewardError, match=words) as caught:
        await pool.score(request("a", behaviour))
    assert (caught.value.kind, caught.value.index) == (kind, 1)


async def test_crash_is_retried_and_keeps_the_scores_it_had(pool, tmp_path):
    context = {"marker": str(tmp_path / "marker")}
    scores = await pool.score(request("a", "once", "bb", max_attempts=2, context=context))
    assert [score.parts["length"] for score in scores] == [1.0, 4.0, 2.0]


async def test_attempts_are_counted_per_response(pool):
    with pytest.raises(RewardError, match="response 1: raised"):
        await pool.score(request("a", "raise", "crash", max_attempts=3))


async def test_unknown_reward_fails_with_the_installed_names(pool):
    with pytest.raises(RewardError, match=r"load: ValueError: no reward 'nobody'.*behave, exact"):
        await pool.score(request("a", name="nobody"))


async def test_settings_of_the_service_are_hidden_from_rewards(pool):
    assert (await pool.score(request("secrets")))[0].reward == 0.0


async def test_cancelled_scoring_leaves_no_process(pool):
    await pool.score(request("a"))
    pid = idle_pid(pool)
    scoring = asyncio.create_task(pool.score(request("hang", timeout_s=60)))
    await asyncio.sleep(0.2)
    scoring.cancel()
    await asyncio.wait({scoring})
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_kill_takes_along_what_the_reward_started(pool, tmp_path):
    marker = tmp_path / "pid"
    with pytest.raises(RewardError, match="timeout"):
        await pool.score(request("child", timeout_s=0.5, context={"marker": str(marker)}))
    stat = Path(f"/proc/{marker.read_text()}/stat")
    await asyncio.to_thread(wait_until_gone, stat)


async def test_start_of_a_scoring_process_imports_nothing_heavy():
    process = await RewardProcess.start(memory_limit_mb=128)
    try:
        scores: dict = {}
        await process.score(request("4", name="exact", context={"answer": "4"}), [0], scores)
        assert scores[0].reward == 1.0
    finally:
        await process.kill()


async def test_built_in_rewards_run_within_the_default_limits(pool):
    entry = {"question": "1 + 1 =", "answer": "2", "metadata": {}, "task": "chain_sum", "options": {}}
    for name in ("exact", "math", "reasoning_gym"):
        scores = await pool.score(request("2", "3", name=name, context=entry, memory_limit_mb=2048, timeout_s=10))
        assert [score.reward == 1.0 for score in scores] == [True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent death signal")
def test_killed_rollout_leaves_no_scoring_process_behind():
    script = """
import asyncio
from services.rollout.rewards.process import RewardProcess, RewardRequest
async def main():
    process = await RewardProcess.start(512)
    print(process.pid, flush=True)
    await process.score(RewardRequest("behave", {}, {}, ["spin"], 600, 512, 1), [0], {})
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = Path(f"/proc/{parent.stdout.readline().strip()}/stat")
    time.sleep(0.5)
    assert is_running(child)
    parent.kill()
    parent.communicate()
    wait_until_gone(child)


def wait_until_gone(stat: Path) -> None:
    deadline = time.monotonic() + 2
    while is_running(stat) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(stat)


def is_running(stat: Path) -> bool:
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"
