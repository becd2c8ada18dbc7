"""Rewards that misbehave, in real child processes: only the process dies, and only that response has no score."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onbeat.machine.malloc import KEEP_FREED
from services.rollout.children.limits import MAX_FILE_BYTES, NICENESS
from services.rollout.rewards.child import MAX_OPEN_FILES
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, RewardUnavailable, Score
from services.rollout.rewards.pool import Limits, RewardProcess
from services.rollout.rewards.scorer import Scorer
from tests.installed import install
from tests.waiting import is_running, wait_until, wait_until_gone

REWARDS = '''
import os, resource, signal, subprocess, sys, time
from pathlib import Path

def fork_tree(folder, levels):
    """2 ** levels processes that never end, each known by a file."""
    for _ in range(levels):
        os.fork()
    (folder / str(os.getpid())).touch()
    time.sleep(3600)

def behave(response, context, **options):
    """Does what the response says."""
    if response == "hang":
        time.sleep(3600)
    if response == "nap":
        time.sleep(1.2)
    if response == "spin":
        while True: pass
    if response == "eat":
        return len([bytes(1 << 20) for _ in range(10_000)])
    if response == "raise":
        raise KeyError("no such thing")
    if response == "raise half a character":
        raise ValueError("in " + chr(0xD800))
    if response == "crash":
        print("last words", file=sys.stderr, flush=True)
        os.abort()
    if response == "exit":
        sys.exit(3)
    if response.startswith("daemon"):
        daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open(context["marker"], "a") as file: print(daemon.pid, file=file)
    if response == "daemon, hang":
        time.sleep(3600)
    if response == "daemon, crash":
        os.abort()
    if response == "real-time":
        os.kill(os.getpid(), signal.SIGRTMIN + 1)
    if response == "abstain":
        return None
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
        return float(not {"ONBEAT_REDIS_URL", "GLIBC_TUNABLES", "GRPC_ENABLE_FORK_SUPPORT"}.isdisjoint(os.environ))
    if response == "tree":
        fork_tree(Path(context["folder"]), levels=5)
    if response == "flood":
        while True: os.write(1, b"x" * 65536)
    if response == "close":
        os.closerange(0, 64)
    if response == "vanish":
        os._exit(0)
    if response == "big file":
        with open(context["marker"], "wb") as file: file.truncate(1 << 40)
    if response == "many files":
        files = [open(os.devnull) for _ in range(10_000)]
    if response == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
            signal.signal(number, signal.SIG_IGN)
        while True: pass
    if response == "scribble":
        for number in range(3, 20):
            try: os.write(number, b"5\\n")
            except OSError: pass
    if response == "twin" and os.fork() == 0:
        time.sleep(0.5)
    if response == "fork and exit" and os.fork() == 0:
        sys.exit(0)
    if response == "limits":
        kinds = ("AS", "CORE", "FSIZE", "NOFILE", "CPU")
        values = {kind: resource.getrlimit(getattr(resource, "RLIMIT_" + kind)) for kind in kinds}
        values |= {kind: tuple(v >> 20 for v in values[kind]) for kind in ("AS", "FSIZE")}
        soft_and_hard = {f"{kind}_{i}": v for kind, pair in values.items() for i, v in zip(("soft", "hard"), pair)}
        expendable = int(Path("/proc/self/oom_score_adj").read_text())
        return {"reward": 1.0, "nice": os.nice(0), "expendable": expendable, **soft_and_hard}
    return {"reward": 1.0, "length": len(response), "pid": os.getpid()}

async def rank(responses, context):
    """Rewards longer responses; does what the first one says."""
    with open(context["calls"], "a") as file: print(len(responses), file=file)
    if responses[0].startswith("nap"):
        time.sleep(1.2)
    if responses[0] == "hang":
        time.sleep(3600)
    if responses[0] == "once" and len(Path(context["calls"]).read_text().split()) == 1:
        os.abort()
    if responses[0] == "few":
        return [1.0, 2.0, 3.0]
    return [sorted(map(len, responses)).index(len(text)) for text in responses]
'''


@pytest.fixture(autouse=True)
def installed_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a user's own reward on the path of child processes."""
    entry = "[onbeat.rewards]\nbehave = onbeat_test_rewards:behave\nrank = onbeat_test_rewards:rank\n"
    site = install(tmp_path / "site", "onbeat_test_rewards", entry, onbeat_test_rewards=REWARDS)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("ONBEAT_REDIS_URL", "redis://:secret@nowhere")
    monkeypatch.setenv("GLIBC_TUNABLES", KEEP_FREED)
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", "0")


@pytest.fixture
async def scorer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("services.rollout.retries.FIRST_DELAY_S", 0.01)
    scorer = Scorer(1, {}, "w0")
    yield scorer
    await scorer.close()


async def score(scorer: Scorer, request: RewardRequest, deadline_s: float = 60.0) -> list[Score]:
    return await scorer.score(request, asyncio.get_running_loop().time() + deadline_s)


def request(*responses: str, max_attempts: int = 1, timeout_s: float = 5.0, context: dict | None = None, **kwargs):
    defaults = {"name": "behave", "options": {}, "memory_limit_mb": 512}
    limits = {"timeout_s": timeout_s, "max_attempts": max_attempts}
    return RewardRequest(**(defaults | limits | kwargs), context=context or {}, responses=list(responses))


@pytest.mark.parametrize("behaviour", ["hang", "spin", "stubborn"])
async def test_hanging_reward_is_killed_and_replaced(scorer, behaviour):
    (first,) = await score(scorer, request("a", timeout_s=1.0))
    with pytest.raises(RewardUnavailable, match=r"response 1: timeout: scoring took longer than 1 s"):
        await score(scorer, request("a", behaviour, timeout_s=1.0))
    with pytest.raises(ProcessLookupError):
        os.kill(int(first.parts["pid"]), 0)
    assert (await score(scorer, request("a")))[0].reward == 1.0


async def test_timeout_is_per_response_not_per_group(scorer):
    with pytest.raises(RewardUnavailable, match="response 2: timeout"):
        await score(scorer, request("nap", "nap", "hang", timeout_s=2.3))  # 1.2 s each


async def test_none_is_a_score_without_a_reward(scorer):
    scores = await score(scorer, request("abstain", "a"))
    assert [score.reward for score in scores] == [None, 1.0]


async def test_garbage_on_stdout_does_not_reach_the_protocol(scorer):
    scores = await score(scorer, request("print", "a"))
    assert [score.reward for score in scores] == [1.0, 1.0]


@pytest.mark.parametrize(
    ("behaviour", "outcome", "words"),
    [
        ("nan", RewardRefused, "invalid: reward is nan, not a number from -1000000 to 1000000"),
        ("raise", RewardRefused, "raised: KeyError: 'no such thing'"),
        ("raise half a character", RewardRefused, r"raised: ValueError: in \?"),
        ("big file", RewardRefused, "raised: OSError: .*File too large"),
        ("many files", RewardRefused, "raised: OSError: .*Too many open files"),
        ("crash", RewardUnavailable, "crashed: .* killed by SIGABRT; it said: (last words|.*Aborted)"),
        pytest.param(
            "real-time",
            RewardUnavailable,
            "crashed: .* killed by signal 35",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="has real-time signals"),
        ),
        ("eat", RewardUnavailable, "memory: the memory limit"),
        ("exit", RewardRefused, "raised: SystemExit: 3"),
        ("vanish", RewardUnavailable, "crashed: .* exited with code 0"),
        ("close", RewardUnavailable, "crashed: .* exited with code"),
        ("flood", RewardUnavailable, "crashed: killed: it printed more than 4194304 bytes"),
        ("scribble", RewardUnavailable, "crashed: the reward wrote into the protocol"),
    ],
)
async def test_broken_reward_is_the_right_error_and_never_a_zero(scorer, behaviour, outcome, words, tmp_path):
    context = {"marker": str(tmp_path / "file")}
    with pytest.raises(outcome, match=f"response 1: {words}") as caught:
        await score(scorer, request("a", behaviour, context=context, timeout_s=20.0))
    assert caught.value.index == 1
    assert (await score(scorer, request("a")))[0].reward == 1.0


@pytest.mark.parametrize("options", [{"unknown": 1}, {"response": "again"}])
async def test_option_that_the_reward_does_not_know_is_its_refusal(scorer, options):
    with pytest.raises(RewardRefused, match="options: TypeError"):
        await score(scorer, request("2", name="exact", options=options, context={"answer": "2"}))


async def test_crash_is_retried_and_keeps_the_scores_it_had(scorer, tmp_path):
    context = {"marker": str(tmp_path / "marker")}
    scores = await score(scorer, request("a", "once", "bb", max_attempts=2, context=context))
    assert [score.parts["length"] for score in scores] == [1.0, 4.0, 2.0]


async def test_attempts_are_counted_per_response(scorer):
    with pytest.raises(RewardRefused, match="response 1: raised"):
        await score(scorer, request("a", "raise", "crash", max_attempts=3))


@pytest.mark.parametrize("groups", [["twin", "nap"], ["twin+nap"]], ids=["next group", "same group"])
async def test_reward_that_forks_and_returns_twice_mixes_no_scores(scorer, groups):
    """The twin's answer arrives while the nap is awaited."""
    for group in groups:
        responses = group.split("+")
        scores = await score(scorer, request(*responses, max_attempts=3))
        assert [score.parts["length"] for score in scores] == [len(response) for response in responses]


async def test_fork_that_exits_takes_no_request_away(scorer):
    pids = {(await score(scorer, request(text)))[0].parts["pid"] for text in ["fork and exit", *"abcdefgh"]}
    assert len(pids) == 1


async def test_unknown_reward_fails_with_the_installed_names(scorer):
    with pytest.raises(RewardRefused, match=r"load: ValueError: no reward 'nobody'.*behave, exact"):
        await score(scorer, request("a", name="nobody"))


async def test_settings_of_the_service_are_hidden_from_rewards(scorer):
    assert (await score(scorer, request("secrets")))[0].reward == 0.0


async def test_rewards_with_other_limits_keep_their_processes(scorer):
    pids = []
    for timeout_s in (50, 60, 50, 60):
        (outcome,) = await score(scorer, request("a", timeout_s=timeout_s))
        pids.append(outcome.parts["pid"])
    assert pids[:2] == pids[2:]
    assert pids[0] != pids[1]


async def test_cancelled_scoring_leaves_no_process_of_a_whole_tree(scorer, tmp_path):
    folder = tmp_path / "processes"
    folder.mkdir()
    scoring = asyncio.create_task(score(scorer, request("tree", timeout_s=600, context={"folder": str(folder)})))
    await asyncio.to_thread(wait_until, lambda: len(list(folder.iterdir())) == 32, "all run")
    scoring.cancel()
    await asyncio.wait({scoring})
    for file in folder.iterdir():
        await asyncio.to_thread(wait_until_gone, Path(f"/proc/{file.name}/stat"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("behaviour", ["daemon", "daemon, hang", "daemon, crash"])
async def test_process_left_by_a_reward_blocks_no_caller_and_no_pipe(scorer, behaviour, tmp_path):
    def num_open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    await score(scorer, request("a"))
    await scorer.close()
    before, marker = num_open_files(), tmp_path / "pids"
    try:
        async with asyncio.timeout(60):
            with contextlib.suppress(RewardUnavailable):
                await score(scorer, request(behaviour, timeout_s=2.0, context={"marker": str(marker)}))
            assert (await score(scorer, request("a")))[0].reward == 1.0
            await scorer.close()
        for pid in marker.read_text().split():
            assert is_running(Path(f"/proc/{pid}/stat"))
        await asyncio.to_thread(wait_until, lambda: num_open_files() <= before, "the pipes are closed")
    finally:
        for pid in marker.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


# ---- functions of a group ------------------------------------------------------------------------------------------


@pytest.fixture
def of_group(tmp_path):
    """Return a function that makes requests to the reward `rank`, and the file with a line for each call."""
    calls = tmp_path / "calls"
    return lambda *responses, **kwargs: request(*responses, name="rank", context={"calls": str(calls)}, **kwargs), calls


async def test_group_is_scored_in_one_call_within_its_own_time(scorer, of_group):
    ask, calls = of_group
    scores = await score(scorer, ask("nap", "nap a", "nap ab", timeout_s=0.9))
    assert [score.reward for score in scores] == [0.0, 1.0, 2.0]
    assert calls.read_text(encoding="utf-8") == "3\n"


async def test_group_that_takes_too_long_fails_as_a_whole(scorer, of_group):
    ask, _ = of_group
    with pytest.raises(RewardUnavailable, match=r"^timeout: scoring took longer than 1 s for 2 responses"):
        await score(scorer, ask("hang", "a", timeout_s=0.5))


async def test_group_is_scored_again_as_a_whole_after_a_crash(scorer, of_group):
    ask, calls = of_group
    scores = await score(scorer, ask("once", "a", max_attempts=2))
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert calls.read_text(encoding="utf-8") == "2\n2\n"


async def test_other_number_of_rewards_names_both_numbers(scorer, of_group):
    ask, _ = of_group
    with pytest.raises(RewardRefused, match=r"^invalid: it returned 3 rewards for 8 responses; return one for each"):
        await score(scorer, ask("few", *"abcdefg"))


# ---- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_every_limit_is_set_before_the_reward_runs(scorer):
    (outcome,) = await score(scorer, request("limits", memory_limit_mb=300, timeout_s=30))
    expected = {
        "AS": 300,  # MiB
        "CORE": 0,
        "FSIZE": MAX_FILE_BYTES >> 20,
        "NOFILE": MAX_OPEN_FILES,
    }
    limits = outcome.parts
    assert {kind: limits[f"{kind}_soft"] for kind in expected} == expected
    assert {kind: limits[f"{kind}_hard"] for kind in expected} == expected
    assert 31 <= limits["CPU_soft"] <= 40  # the seconds used before, the response's 30 s and one more
    assert (limits["nice"], limits["expendable"]) == (min(19, os.nice(0) + NICENESS), 1000)


def test_unwatched_spinning_reward_runs_out_of_cpu_time():
    """A scoring process that no parent watches over is asked to score one response within 0.5 s."""
    command = [sys.executable, "-m", "services.rollout.rewards.child", "0.5", "512"]
    message = {"request": 1, "reward": "behave", "options": {}, "context": {}, "responses": ["spin"]}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            assert process.wait(60) == -signal.SIGXCPU
        finally:
            process.kill()


def test_cpu_time_is_of_each_response_not_of_the_process():
    script = """
import time
from services.rollout.rewards.child import grant_cpu_time
for _ in range(8):
    grant_cpu_time(1.0)
    started = time.process_time()
    while time.process_time() < started + 0.5: pass
"""
    subprocess.run([sys.executable, "-c", script], check=True)


async def test_start_of_a_scoring_process_imports_nothing_heavy():
    process = await RewardProcess.start(Limits(timeout_s=5.0, memory_mb=128))
    try:
        scores: dict = {}
        await process.score(request("4", name="exact", context={"answer": "4"}), [0], scores)
        assert scores[0].reward == 1.0
    finally:
        await process.child.kill()


async def test_users_own_folder_named_services_is_not_ours(scorer, monkeypatch, tmp_path):
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").write_text("raise ImportError('of the user')\n")
    monkeypatch.chdir(tmp_path)
    assert [score.reward for score in await score(scorer, request("fine"))] == [1.0]


async def test_built_in_rewards_run_within_the_default_limits(scorer):
    entry = {"question": "1 + 1 =", "answer": "2", "metadata": {}, "task": "chain_sum", "options": {}}
    for name in ("exact", "math", "reasoning_gym"):
        scores = await score(scorer, request("2", "3", name=name, context=entry, memory_limit_mb=2048, timeout_s=10))
        assert [score.reward == 1.0 for score in scores] == [True, False]


@pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel's parent death signal")
def test_killed_rollout_leaves_no_scoring_process_behind():
    script = """
import asyncio
from services.rollout.rewards.outcome import RewardRequest
from services.rollout.rewards.pool import Limits, RewardProcess
async def main():
    process = await RewardProcess.start(Limits(600.0, 512))
    print(process.child.pid, flush=True)
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
