"""`python -m services.rollout.environments.child MEMORY_MB` plays episodes for the pool that started it.

It speaks JSON lines: one request after another on stdin, several answers to each on stdout. The first request has the
environment built, for all of them.

    -> {"request": 1, "name": "wordle", "options": {}, "timeout_s": 120.0,
        "task": {...}, "access": [["http://...", "key"], ["http://...", "key"]]}
    <- {"request": 1, "step": "loaded", "warning": ""}  to the first one; or "failed"
    <- {"request": 1, "step": "ended", "episode": 1, "has_busy_threads": false, "reward": 1.0, "parts": {},
        "turn_rewards": {}}
    <- {"request": 1, "step": "failed", "episode": 0, "has_busy_threads": true, "kind": "raised", "message": "..."}

All episodes of a request run in one event loop, which ends those that take too long. When it does not answer, because
an environment blocks it, the parent kills this process.
"""

import asyncio
import copy
import functools
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from traceback import walk_tb
from typing import Any, TextIO

from onbeat.environments import Environment, Outcome, Session, Task
from onbeat.environments.final_reward import SCORE
from onbeat.environments.load import load_environment
from onbeat.environments.tools import ToolsEnvironment
from onbeat.process.children import MAX_ANSWER_BYTES
from onbeat.process.confine import die_with_parent
from services.rollout.children.limits import (
    MAX_MESSAGE,
    Answers,
    restrict_this_process,
    take_protocol_streams,
)
from services.rollout.children.numbers import InvalidReward, check_numbers
from services.rollout.rewards.outcome import RewardRequest, Score
from services.rollout.rewards.pool import RewardPool

MAX_OPEN_FILES = 4096  # connections of each episode count
MAX_PLACE = 100  # characters
MAX_OUTCOME_BYTES = MAX_ANSWER_BYTES // 2
NUM_THREADS = 64  # methods that do not await, at a time
REWARD_S = 30.0  # time for an installed reward of an answer


class EpisodeTimeout(Exception):
    """An episode was longer than its limit."""


def main() -> None:
    requests, answers = take_protocol_streams()
    die_with_parent()
    restrict_this_process(int(sys.argv[1]), MAX_OPEN_FILES)
    SCORE.set(Rewards(int(sys.argv[1])).score)
    asyncio.run(serve(requests, answers))


async def serve(requests: TextIO, answers: Answers) -> None:
    """Answer one request after another, until stdin ends."""
    threads = Threads(NUM_THREADS)
    asyncio.get_running_loop().set_default_executor(threads)
    environment: Environment | None = None
    while line := await asyncio.to_thread(requests.readline):
        request = json.loads(line)
        if environment is None:
            try:
                environment = load_environment(request["name"], request["options"])
            except Exception as error:  # noqa: BLE001  an environment is foreign code and may raise anything
                answers.send(request["request"], "failed", episode=0, **describe(error, "load"))
                return
            warning = environment.warning if isinstance(environment, ToolsEnvironment) else ""
            answers.send(request["request"], "loaded", warning=warning)
        async with asyncio.TaskGroup() as episodes:
            for episode, (url, key) in enumerate(request["access"]):
                task = Task(**copy.deepcopy(request["task"]))  # an episode may change its messages or its answer
                playing = play(environment, task, Session(url, key), request["timeout_s"])
                send = functools.partial(answers.send, request["request"], episode=episode)
                episodes.create_task(report(playing, send, threads))
    os._exit(0)  # threads of an environment may hang


class Threads(ThreadPoolExecutor):
    """The threads of methods that do not await. A call that an environment has given up goes on in its thread."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.calls: set[Future[Any]] = set()  # calls that have not returned

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        call = super().submit(*args, **kwargs)
        self.calls.add(call)
        call.add_done_callback(self.calls.discard)
        return call


async def report(playing: Any, send: Callable[..., None], threads: Threads) -> None:
    try:
        step, fields = "ended", await playing
    except BaseException as error:  # noqa: BLE001  as above, and a tool may well call sys.exit
        step, fields = "failed", describe(error, "raised")
    send(step, has_busy_threads=bool(threads.calls), **fields)


async def play(environment: Environment, task: Task, session: Session, limit_s: float) -> dict[str, Any]:
    """Play one episode. Return its outcome as JSON, or raise what the environment raises."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            running = environment.run(task, session)
            if not inspect.isawaitable(running):
                raise InvalidReward(f"`run` returned {running!r:.200} at once; write `async def run`")
            outcome = await running
    finally:
        await session.close()
        if limit.expired():  # the time is over, even if the environment caught the exception
            raise EpisodeTimeout(f"the episode took longer than {limit_s:g} s")
    return check_outcome(outcome)


class Rewards:
    """Installed rewards, in a scoring process: one that blocks holds up no episode, and some need a main thread."""

    def __init__(self, memory_mb: int) -> None:
        self._pool, self._memory_mb = RewardPool(num_processes=1), memory_mb

    async def score(
        self, name: str, options: dict[str, Any], context: dict[str, Any], response: str
    ) -> Mapping[str, float]:
        """Return the reward of a response, and its parts. Raises RewardError, and InvalidReward for no opinion."""
        request = RewardRequest(name, options, context, [response], REWARD_S, self._memory_mb, max_attempts=1)
        scores: dict[int, Score] = {}
        await self._pool.score(request, [0], scores, math.inf)
        reward, parts = scores[0].reward, scores[0].parts
        if reward is None:
            raise InvalidReward(f"the reward {name} has no opinion on the answer, and an episode needs a number")
        return {"reward": reward} | parts


def is_of_network(error: BaseException) -> bool:
    """Return whether a connection could not be made, or broke. Libraries are not imported for this."""
    httpx = sys.modules.get("httpx")
    of_httpx = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout) if httpx else ()
    return isinstance(error, (ConnectionError, *of_httpx))


def describe(error: BaseException, kind: str) -> dict[str, str]:
    """Return kind and message of a failure. Of several errors at once, the first one counts."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    match error:
        case MemoryError():
            kind, message = "memory", "the memory limit was reached"
        case RuntimeError() if str(error) == "can't start new thread":  # the thread's stack needs address space
            kind, message = "memory", f"{error}: memory_limit_mb, or a limit of the system, was reached"
        case EpisodeTimeout():
            kind, message = "timeout", str(error)
        case InvalidReward():
            kind, message = "invalid", str(error)
        case _:
            kind = "unreachable" if is_of_network(error) else kind
            message = f"{type(error).__name__}: {text_of(error)}"[: MAX_MESSAGE - MAX_PLACE] + place_of(error)
    return {"kind": kind, "message": message[:MAX_MESSAGE].encode(errors="replace").decode()}


def place_of(error: BaseException) -> str:
    """Return the place in the environment's own code that an error comes from, in brackets; '' if there is none."""
    frames = [(frame.f_globals.get("__name__", ""), frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    if not frames or not is_ours(frames[0][0]):  # an error of several at once, which was raised elsewhere
        return ""
    foreign = [(name.partition(".")[0], code, line) for name, code, line in frames if not is_ours(name)]
    frames_of_package = [
        (code, line) for package, code, line in foreign if package == foreign[0][0]
    ]  # not what that calls
    if not frames_of_package:
        return ""
    code, line = frames_of_package[-1]
    return f" ({os.path.basename(code.co_filename)}, line {line}, in {code.co_name})"[:MAX_PLACE]


def is_ours(module: str) -> bool:
    """Return whether a module only leads to the environment's code. As a program this one has another name."""
    return module.partition(".")[0] in ("__main__", "services", "onbeat", "asyncio", "concurrent")


def text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001  as above
        return f"(its text raises {type(broken).__name__})"


def check_outcome(outcome: Any) -> dict[str, Any]:
    """Return an outcome as JSON. Raises InvalidReward."""
    if not isinstance(outcome, Outcome):
        raise InvalidReward(f"it returned {outcome!r:.200}, not an Outcome")
    checked: dict[str, Any] = check_numbers({"reward": outcome.reward})
    for name, given in (("parts", outcome.parts), ("turn_rewards", outcome.turn_rewards)):
        if not isinstance(given, Mapping):
            raise InvalidReward(f"{name} is {given!r:.200}, not a mapping of names to numbers")
        checked[name] = check_numbers(given)
    if (num_bytes := len(json.dumps(checked))) > MAX_OUTCOME_BYTES:
        raise InvalidReward(f"its outcome has {num_bytes} bytes, of at most {MAX_OUTCOME_BYTES}: give it fewer parts")
    return checked


if __name__ == "__main__":
    main()
