"""Environments that misbehave, in real child processes: only their process dies, and every episode has a result."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.contracts.records import HostMemory
from onbeat.environments import Outcome, Task
from onbeat.process.children import ChildProcess
from onbeat.process.confine import MEBIBYTE
from services.rollout.environments import pool as pool_module
from services.rollout.environments import process as process_module
from services.rollout.environments.child import MAX_OPEN_FILES
from services.rollout.environments.pool import EnvironmentProcesses
from services.rollout.episodes.contract import EpisodeAccess, EpisodeFailure, PlayRequest, Program
from tests.installed import install
from tests.waiting import is_running, wait_until, wait_until_gone

pytestmark = pytest.mark.slow

ENVIRONMENTS = '''
import asyncio, collections, json, os, resource, signal, subprocess, sys, threading, time
import httpx
from pathlib import Path
from onbeat.process import confine
from onbeat.environments import Outcome
from onbeat.environments.final_reward import reward_of_answer

class Mute(Exception):
    def __str__(self): raise KeyError("no text")

class Behave:
    """Does what the key of the episode says; everything else ends with a reward."""

    def __init__(self, **options):
        self.options = options
        if options.get("refuse"): raise ValueError("no such option")
        if options.get("vanish"): os._exit(7)

    async def run(self, task, policy):
        key, place = policy.key, task.metadata.get("place", "")
        if key == "nap": await asyncio.sleep(0.3)
        if key == "share":
            task.messages.append({}); task.metadata["seen"].append(1)
            await asyncio.sleep(0)
            return Outcome(len(task.messages) + len(task.metadata["seen"]))
        if key == "raise": raise KeyError("no such thing")
        if key == "raise in a tool": await asyncio.to_thread(self.tool)
        if key == "unreachable": await httpx.AsyncClient().get("http://127.0.0.1:9")
        if key == "reset": raise ExceptionGroup("several", [ConnectionResetError("by the peer")])
        if key == "group": raise ExceptionGroup("several", [RuntimeError("the first"), ValueError()])
        if key == "cancel": raise asyncio.CancelledError()
        if key == "half a character": raise ValueError(chr(0xD800))
        if key == "wait": await asyncio.sleep(3600)
        if key == "zero":
            try: await asyncio.sleep(3600)
            except BaseException: return Outcome(0.0)
        if key == "deaf":
            while True:
                try: await asyncio.sleep(3600)
                except asyncio.CancelledError: pass
        if key == "own timeout":
            async with asyncio.timeout(0.01): await asyncio.sleep(3600)
        if key == "thread": await asyncio.to_thread(time.sleep, 3600)
        if key == "give up":
            calls = [asyncio.to_thread(time.sleep, 3600) for _ in range(64)]
            try: await asyncio.wait_for(asyncio.gather(*calls), 0.1)
            except TimeoutError: pass
        if key == "block": time.sleep(3600)
        if key.startswith("score"):
            parts = await reward_of_answer(key, self.options, task, [])
            return Outcome(parts["reward"], dict(parts))
        if key == "eat": return len([bytes(1 << 20) for _ in range(10_000)])
        if key == "threads":
            for _ in range(10_000): threading.Thread(target=time.sleep, args=(60,)).start()
        if key == "nan": return Outcome(float("nan"))
        if key == "huge": return Outcome(1.0, {"length": -1e39})
        if key == "odd turn": return Outcome(1.0, turn_rewards=[1.0])
        if key == "number": return 1.0
        if key == "quit": sys.exit(3)
        if key == "quit in a thread": await asyncio.to_thread(sys.exit, 3)
        if key == "mute": raise Mute()
        if key == "parts": return Outcome(1.0, {f"part {n}": 1.0 for n in range(100_000)})
        if key == "crash":
            print("last words", file=sys.stderr, flush=True)
            os.abort()
        if key == "flood":
            while True: os.write(1, b"x" * 65536)
        if key == "forge":
            line = {"request": 1, "step": "failed", "episode": -1, "kind": "raised", "message": ""}
            for number in range(3, 20):
                try: os.write(number, json.dumps(line).encode() + b"\\n")
                except OSError: pass
            await asyncio.sleep(3600)
        if key == "twin" and os.fork() == 0: await asyncio.sleep(0.2)
        if key == "child":
            Path(place).write_text(str(os.fork() or time.sleep(3600)))
            await asyncio.sleep(3600)
        if key == "leash":
            command = [sys.executable, "-I", confine.__file__, '{"parent": %d}' % os.getpid(), "sleep", "600"]
            Path(place).write_text(str(subprocess.Popen(command, start_new_session=True).pid))
            await asyncio.sleep(3600)
        if key == "close":
            await policy.close()
            await policy.chat([{"role": "user", "content": "hello"}])
        if key == "chat": await policy.chat([{"role": "user", "content": "hello"}])
        if key == "late":
            async def call_later():
                await asyncio.sleep(0.05)
                await policy.chat([{"role": "user", "content": "hello"}])
            self.late = asyncio.create_task(call_later())
        parts = {"pid": os.getpid(), "secret": "ONBEAT_REDIS_URL" in os.environ, **self.options}
        if key == "limits":
            for kind in ("AS", "CORE", "FSIZE", "NOFILE"):
                parts[kind] = resource.getrlimit(getattr(resource, "RLIMIT_" + kind))[1]
            parts |= {kind: parts[kind] >> 20 for kind in ("AS", "FSIZE")}
            parts["nice"] = os.nice(0)
        return Outcome(1.0, parts, {"call-1": 0.5})

    def tool(self):
        try: json.loads("{")
        except ValueError: raise ValueError("bad")

class Shelf(collections.UserDict):
    def get_reward(self): return 1.0

class Blocking:
    def run(self, task, policy): return Outcome(1.0)

def gives_a_number():
    return 5

def wait(response, context): time.sleep(3600)

def ring(response, context, level):
    """Ask for an alarm, as math-verify does: only the main thread of a process may do that."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return {"reward": level * (context["answer"] == "2"), "pid": os.getpid()}
'''

ENTRIES = """[onbeat.environments]
behave = onbeat_test_environments:Behave
blocking = onbeat_test_environments:Blocking
shelf = onbeat_test_environments:Shelf
number = onbeat_test_environments:gives_a_number
missing = no_such_package:Nothing

[onbeat.rewards]
score by waiting = onbeat_test_environments:wait
score by ringing = onbeat_test_environments:ring
"""


PROGRAM = Program("behave", "{}", 1024)


@pytest.fixture(autouse=True)
def installed_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a user's own environments on the path of child processes."""
    name = "onbeat_test_environments"
    site = install(tmp_path / "site", name, ENTRIES, **{name: ENVIRONMENTS})
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("ONBEAT_REDIS_URL", "redis://:secret@nowhere")


@pytest.fixture
async def processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process_module, "GRACE_S", 60.0)  # this machine may be busy
    processes = EnvironmentProcesses(1, [PROGRAM])
    yield processes
    await processes.close()


def request(
    *keys: str, name="behave", options=None, memory_limit_mb=1024, metadata=None, timeout_s=20.0, **callbacks
) -> PlayRequest:
    program = Program(name, json.dumps(options or {}), memory_limit_mb)
    task = Task([{"role": "user", "content": "1 + 1 ="}], "1 + 1 =", "2", metadata or {})
    access = [EpisodeAccess("http://127.0.0.1:9", key) for key in keys]
    return PlayRequest(program, task, timeout_s, access, **callbacks)


def kinds(results) -> list[str]:
    return [result.kind if isinstance(result, EpisodeFailure) else "ended" for result in results]


def pid_of(result) -> int:
    assert isinstance(result, Outcome), result
    return int(result.parts["pid"])


async def test_outcomes_come_back_in_order_and_side_by_side(processes):
    ended: list[int] = []
    begun: list[int] = []
    on = {"on_begin": lambda: begun.append(len(ended)), "on_end": ended.append}
    results = await processes.play(request("nap", "a", "nap", options={"level": 2}, **on))
    assert kinds(results) == ["ended"] * 3
    for result in results:
        assert (result.reward, result.parts["level"], result.turn_rewards) == (1.0, 2, {"call-1": 0.5})
    assert (begun, ended[0]) == ([0], 1)
    assert sorted(ended) == [0, 1, 2]


async def test_as_many_groups_are_played_as_memory_is_free_for(monkeypatch):
    set_free_memory(monkeypatch, 3 * 1024)
    processes = EnvironmentProcesses(8, [PROGRAM])
    assert processes.num_groups() == 3
    await processes.play(request("a"))
    assert processes.num_groups() == 4  # the idle process has its memory
    playing = asyncio.create_task(processes.play(request("wait")))
    await asyncio.sleep(0)
    assert processes.num_groups() == 4
    assert EnvironmentProcesses(2, [PROGRAM]).num_groups() == 2
    assert EnvironmentProcesses(8, [Program("behave", "{}", 8192)]).num_groups() == 1  # else none would ever be played
    playing.cancel()
    await asyncio.wait({playing})
    await processes.close()


def set_free_memory(monkeypatch: pytest.MonkeyPatch, free_mb: int) -> None:
    free = HostMemory(name="box", available_bytes=free_mb * MEBIBYTE, total_bytes=8 * 1024 * MEBIBYTE)
    monkeypatch.setattr(pool_module, "read_memory", lambda: free)


OTHER = {"options": {"level": 2}, "memory_limit_mb": 2048}


@pytest.fixture
async def two(monkeypatch: pytest.MonkeyPatch):
    """Three processes for two environments, of which one takes 1 GB and the other 2 GB; 4 GB are free."""
    set_free_memory(monkeypatch, 4 * 1024)
    processes = EnvironmentProcesses(3, [PROGRAM, request(**OTHER).program])
    yield processes
    await processes.close()


async def test_processes_of_two_environments_stay_warm(two):
    """An environment that is loaded again for every group would take longer than its episodes."""
    first, other = await asyncio.gather(two.play(request("a")), two.play(request("a", **OTHER)))
    again, third = await asyncio.gather(two.play(request("nap")), two.play(request("nap")))
    (other_again,) = await two.play(request("a", **OTHER))
    assert pid_of(first[0]) in (pid_of(again[0]), pid_of(third[0]))
    assert pid_of(other[0]) == pid_of(other_again)


async def test_idle_processes_make_way_for_another_environment(two, monkeypatch):
    naps = await asyncio.gather(*(two.play(request("nap")) for _ in range(3)))
    pids = {pid_of(result) for (result,) in naps}
    await two.play(request("a", **OTHER))  # a fourth process would be one too many
    assert len({pid for pid in pids if is_running(Path(f"/proc/{pid}/stat"))}) == 2
    set_free_memory(monkeypatch, 1024)
    await asyncio.gather(two.play(request("nap", **OTHER)), two.play(request("nap", **OTHER)))
    assert not any(is_running(Path(f"/proc/{pid}/stat")) for pid in pids)  # both have made way for its memory


async def test_groups_to_play_are_counted_for_the_larger_one(two, monkeypatch):
    """The environment of the next prompts is not known: 4 GB are two processes of the larger one."""
    assert two.num_groups() == 2
    playing = asyncio.create_task(two.play(request("wait")))
    await asyncio.sleep(0)
    assert two.num_groups() == 3
    set_free_memory(monkeypatch, 1024)
    assert two.num_groups() == 1  # it plays, and another one of the larger ones has no memory
    playing.cancel()
    await asyncio.wait({playing})
    await two.play(request("a", **OTHER))
    assert two.num_groups() == 1  # the smaller one has the memory for one, the larger one a process that is idle
    set_free_memory(monkeypatch, 2 * 1024)
    assert two.num_groups() == 2


async def test_no_episode_sees_how_another_changes_the_task(processes):
    """A user's code may well append to the prompt's messages: the group's other episodes begin without that."""
    results = await processes.play(request("share", "share", "share", metadata={"seen": []}))
    assert [result.reward for result in results] == [3.0, 3.0, 3.0]


async def test_process_stays_warm_for_the_same_environment(processes):
    (first,) = await processes.play(request("a"))
    (second,) = await processes.play(request("a"))
    (third,) = await processes.play(request("a", options={"level": 1}))
    assert pid_of(first) == pid_of(second) != pid_of(third)
    with pytest.raises(ProcessLookupError):
        os.kill(pid_of(first), 0)


@pytest.mark.parametrize(
    ("key", "kind", "words"),
    [
        ("raise", "raised", "KeyError: 'no such thing' (onbeat_test_environments.py, line "),
        ("raise in a tool", "raised", "ValueError: bad (onbeat_test_environments.py, line "),
        ("group", "raised", "RuntimeError: the first"),
        ("unreachable", "unreachable", "ConnectError: "),
        ("reset", "unreachable", "ConnectionResetError: by the peer"),
        ("cancel", "raised", "CancelledError"),
        ("quit", "raised", "SystemExit: 3"),
        ("quit in a thread", "raised", "SystemExit: 3"),
        ("mute", "raised", "Mute: (its text raises KeyError)"),
        ("parts", "invalid", "bytes, of at most 524288: give it fewer parts"),
        ("own timeout", "raised", "TimeoutError"),
        ("half a character", "raised", "ValueError: ?"),
        ("close", "raised", "client has been closed"),
        ("chat", "raised", "SessionError: the session does not answer: ConnectError"),
        ("nan", "invalid", "reward is nan, not a number from -1000000 to 1000000"),
        ("huge", "invalid", "length is -1e+39, not a number from"),
        ("odd turn", "invalid", "turn_rewards is [1.0], not a mapping of names to numbers"),
        ("number", "invalid", "it returned 1.0, not an Outcome"),
    ],
)
async def test_failed_episode_leaves_the_others_alone(processes, key, kind, words):
    failed, ended = await processes.play(request(key, "nap"))
    assert isinstance(failed, EpisodeFailure)
    assert failed.kind == kind
    assert words in failed.message
    (again,) = await processes.play(request("a"))
    assert pid_of(again) == pid_of(ended)


@pytest.mark.parametrize(
    ("key", "kind", "words"),
    [
        ("crash", "crashed", "was killed by SIGABRT; it said: "),
        ("flood", "output", "it printed more than 4194304 bytes"),
        ("forge", "crashed", "wrote into the protocol"),
    ],
)
async def test_death_of_the_process_fails_what_had_not_ended(processes, key, kind, words):
    ended, failed, other = await processes.play(request("a", key, "wait"))
    assert isinstance(ended, Outcome) or kind == ended.kind  # the process may die before its answer is read
    assert (failed.kind, other.kind) == (kind, kind)
    assert words in failed.message
    assert kinds(await processes.play(request("a"))) == ["ended"]


@pytest.mark.parametrize(
    ("key", "words"),
    [("eat", "the memory limit was reached"), ("threads", "can't start new thread: memory_limit_mb, or a limit of")],
)
async def test_memory_limit_is_a_failure_and_the_process_is_replaced(processes, key, words):
    (first,) = await processes.play(request("a", memory_limit_mb=512))
    (failed,) = await processes.play(request(key, memory_limit_mb=512))
    assert (failed.kind, failed.message[: len(words)]) == ("memory", words)
    (again,) = await processes.play(request("a", memory_limit_mb=512))
    assert pid_of(again) != pid_of(first)


@pytest.mark.parametrize("key", ["wait", "thread", "zero"])
async def test_episode_that_waits_for_ever_times_out_alone(processes, key):
    ended, failed, late = await processes.play(request("a", key, "nap", timeout_s=3.0))
    assert failed == EpisodeFailure("timeout", "the episode took longer than 3 s")
    assert kinds([ended, late]) == ["ended", "ended"]
    (again,) = await processes.play(request("a"))
    assert pid_of(again) != pid_of(ended)


@pytest.mark.parametrize("keys", [("a", "give up"), ("give up", "nap")])
async def test_process_whose_threads_hang_is_replaced(processes, keys):
    results = await processes.play(request(*keys))
    assert kinds(results) == ["ended", "ended"]
    (again,) = await processes.play(request("raise in a tool"))
    assert "ValueError: bad" in again.message
    (after,) = await processes.play(request("a"))
    assert pid_of(after) != pid_of(results[0])


async def test_reward_of_an_answer_that_blocks_holds_up_nobody(processes):
    failed, ended = await processes.play(request("score by waiting", "nap", timeout_s=5.0))
    assert failed == EpisodeFailure("timeout", "the episode took longer than 5 s")
    assert isinstance(ended, Outcome)


async def test_rewards_of_answers_have_a_process_of_their_own(processes):
    scored = [await processes.play(request("score by ringing", "a", options={"level": 2})) for _ in range(2)]
    (first, environment), (second, _) = scored
    assert (first.reward, second.reward) == (2.0, 2.0)
    assert pid_of(first) == pid_of(second) != pid_of(environment)
    (refused,) = await processes.play(request("score by ringing"))
    assert refused.kind == "raised"
    assert "RewardRefused: response 0: options: TypeError: missing a required argument: 'level'" in refused.message
    await asyncio.to_thread(wait_until_gone, Path(f"/proc/{pid_of(first)}/stat"))  # the environment was replaced


@pytest.mark.parametrize("key", ["block", "deaf"])
async def test_process_that_does_not_answer_is_killed(processes, key, monkeypatch):
    monkeypatch.setattr(process_module, "GRACE_S", 1.0)
    (warm,) = await processes.play(request("a"))
    results = await processes.play(request("nap", key, timeout_s=3.0))
    assert results[1].kind == "timeout"
    assert "does not answer: code that does not await holds up all episodes" in results[1].message
    assert kinds(results) == [{"block": "timeout", "deaf": "ended"}[key], "timeout"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid_of(warm), 0)


async def test_fork_that_returns_twice_gives_no_second_result(processes, monkeypatch):
    """The copy runs on in the same event loop, which may harm it: then the process is replaced."""
    monkeypatch.setattr(process_module, "GRACE_S", 1.0)
    results = await processes.play(request("twin", "nap", timeout_s=5.0))
    assert set(kinds(results)) <= {"ended", "timeout"}
    after = [kinds(await processes.play(request("a", timeout_s=5.0))) for _ in range(2)]
    assert after[0] in (["ended"], ["timeout"])
    assert after[1] == ["ended"]


async def test_call_after_the_end_changes_no_result(processes):
    assert kinds(await processes.play(request("late", "nap"))) == ["ended", "ended"]
    assert kinds(await processes.play(request("a"))) == ["ended"]


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"name": "nobody"}, "load", "ValueError: no environment 'nobody' is installed here; there are: behave,"),
        ({"name": "missing"}, "load", "ModuleNotFoundError: No module named 'no_such_package'"),
        ({"name": "number"}, "load", "gave a int, which has no method `run`"),
        ({"name": "blocking"}, "invalid", "write `async def run`"),
        ({"options": {"refuse": True}}, "load", "ValueError: no such option"),
        ({"options": {"vanish": True}}, "crashed", "exited with code 7"),
    ],
)
async def test_environment_that_cannot_be_built_or_run_fails_all(processes, changes, kind, words):
    results = await processes.play(request("a", "b", **changes))
    assert kinds(results) == [kind, kind]
    assert words in results[0].message


async def test_methods_that_are_no_tools_are_logged_once(processes, caplog):
    for _ in range(2):
        await processes.play(request("a", "b", name="shelf"))
        await processes.close()
    (message,) = [record.getMessage() for record in caplog.records if record.name == process_module.__name__]
    assert message.startswith("environment shelf: MutableMapping.clear, UserDict.copy, ")
    assert message.endswith(" are not offered as tools: they are of another package; to offer one, define it in Shelf")


async def test_limits_are_set_and_settings_are_hidden(processes):
    (outcome,) = await processes.play(request("limits", memory_limit_mb=900))
    limits = outcome.parts
    assert (limits["AS"], limits["CORE"], limits["FSIZE"]) == (900, 0, 256)
    assert (limits["NOFILE"], limits["nice"], limits["secret"]) == (MAX_OPEN_FILES, min(19, os.nice(0) + 5), 0)


@pytest.mark.parametrize("key", ["child", "leash"])  # the process's group; another group, but on a leash
async def test_cancelled_group_leaves_no_process(processes, key, tmp_path):
    marker = tmp_path / "pid"
    playing = asyncio.create_task(processes.play(request(key, timeout_s=600, metadata={"place": str(marker)})))
    await asyncio.to_thread(wait_until, lambda: marker.exists() and marker.read_text() != "", "it has begun")
    playing.cancel()
    await asyncio.wait({playing})
    await asyncio.to_thread(wait_until_gone, Path(f"/proc/{marker.read_text()}/stat"))
    assert kinds(await processes.play(request("a"))) == ["ended"]


async def test_cancelled_kill_leaves_no_process_and_no_pipe():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    code = "import os, time; os.close(1); time.sleep(600)"  # it seems to end by itself
    started = await asyncio.create_subprocess_exec(sys.executable, "-c", code, start_new_session=True, **pipes)
    child = ChildProcess(started, "the child")
    await child._stdout.read()
    killing = asyncio.create_task(child.kill())
    for _ in range(2):
        await asyncio.sleep(0.01)
        killing.cancel()
    await asyncio.wait({killing})
    assert started._transport.is_closing()
    await asyncio.to_thread(wait_until_gone, Path(f"/proc/{child.pid}/stat"))


def test_killed_rollout_leaves_no_environment_behind(tmp_path):
    script = """
import asyncio, sys
from onbeat.environments import Task
from services.rollout.environments import EnvironmentProcesses
from services.rollout.episodes.contract import EpisodeAccess, PlayRequest, Program
task = Task([], "", metadata={"place": sys.argv[1]})
access = [EpisodeAccess("http://127.0.0.1:9", "child")]
program = Program("behave", "{}", 1024)
asyncio.run(EnvironmentProcesses(1, [program]).play(PlayRequest(program, task, 600.0, access)))
"""
    marker = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", script, str(marker)])
    wait_until(lambda: marker.exists() and marker.read_text() != "", "it has begun")
    fork = Path(f"/proc/{marker.read_text()}/stat")
    environment = Path(f"/proc/{fork.read_text().rpartition(') ')[2].split()[1]}/stat")
    assert is_running(environment)
    parent.kill()
    parent.wait()
    wait_until_gone(environment)
    os.kill(int(marker.read_text()), signal.SIGKILL)  # the orphaned child has no parent that could stop it
