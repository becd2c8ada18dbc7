"""`python -m services.rollout.rewards.child TIMEOUT_S MEMORY_MB` scores responses for the pool that started it.

The rewards are those that the operator installed under the entry-point group `onbeat.rewards`. No request brings code.
A reward is a function `(response, context, **options)` that returns a finite number, or a mapping with the number under
"reward" and its parts under other names. `context` is the prompt's: {"question", "answer", "metadata", ...}.

It speaks JSON lines: one request on stdin, several answers on stdout, each with the request's number.

    -> {"request": 7, "reward": "exact", "options": {}, "context": {"answer": "4"}, "responses": ["4", "5"]}
    <- {"request": 7, "step": "loaded"}                 the reward is imported, from now on lines have a deadline
    <- {"request": 7, "step": "scored", "position": 0, "reward": 1.0, "parts": {}}
    <- {"request": 7, "step": "failed", "position": 1, "kind": "raised", "message": "..."}   ends the request

The parent limits wall-clock time: it kills this process. The kernel limits CPU time, response by response.
"""

import functools
import importlib
import inspect
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from onbeat.contracts.installed import REWARDS, load_installed
from onbeat.process.confine import die_with_parent
from services.rollout.children.limits import MAX_MESSAGE, Answers, restrict_this_process, take_protocol_streams
from services.rollout.children.numbers import InvalidReward, check_numbers
from services.rollout.deadlines import LOAD_S
from services.rollout.rewards.builtin import MODULES

MAX_OPEN_FILES = 256
# Linux's CPU time of this process by ticks, as RLIMIT_CPU counts it; `process_time` is more exact, and drifts from it.
CLOCK_OF_LIMIT = -8  # (~0 << 3) | CPUCLOCK_PROF, linux/posix-timers.h

RewardFunction = Callable[..., float | Mapping[str, float]]


def main() -> None:
    requests, answers = take_protocol_streams()
    die_with_parent()
    timeout_s, memory_mb = float(sys.argv[1]), int(sys.argv[2])
    restrict_this_process(memory_mb, MAX_OPEN_FILES)
    for line in requests:
        answer(json.loads(line), answers, timeout_s)


def answer(request: dict[str, Any], answers: Answers, timeout_s: float) -> None:
    position, kind, send = 0, "load", functools.partial(answers.send, request["request"])
    try:
        grant_cpu_time(LOAD_S)
        reward: RewardFunction = load_installed(REWARDS, request["reward"])
        if module := MODULES.get(request["reward"]):
            with suppress(ImportError):  # the reward itself says which package is missing
                importlib.import_module(module)
        kind = "options"
        check_options(reward, request["options"])
        send("loaded")
        kind = "raised"
        for position, response in enumerate(request["responses"]):
            grant_cpu_time(timeout_s + 1.0)
            send("scored", position=position, **score(reward, response, request))
    except MemoryError:
        send("failed", position=position, kind="memory", message="the memory limit was reached")
    except InvalidReward as error:
        send("failed", position=position, kind="invalid", message=str(error)[:MAX_MESSAGE])
    except (Exception, SystemExit) as error:  # noqa: BLE001  the reward is foreign code and may raise anything
        message = f"{type(error).__name__}: {error}".encode(errors="replace").decode()  # no halves of characters
        send("failed", position=position, kind=kind, message=message[:MAX_MESSAGE])


def grant_cpu_time(seconds: float) -> None:
    """Let the kernel send SIGXCPU, which kills, when this process has used so much more CPU time. It is a soft limit,
    because that can be moved on."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.clock_gettime(CLOCK_OF_LIMIT) + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def check_options(reward: RewardFunction, options: dict[str, Any]) -> None:
    """Raise TypeError for options that the reward's signature does not take."""
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some functions written in C have none
        return
    signature.bind("", {}, **options)


def score(reward: RewardFunction, response: str, request: dict[str, Any]) -> dict[str, Any]:
    result = reward(response, request["context"], **request["options"])
    if inspect.isawaitable(result):
        raise InvalidReward("it is asynchronous; a reward is a plain function: write `def`, not `async def`")
    parts = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if "reward" not in parts:
        raise InvalidReward(f"the mapping it returned has no 'reward', only {sorted(map(str, parts))}")
    values = check_numbers(parts)
    return {"reward": values.pop("reward"), "parts": values}


if __name__ == "__main__":
    main()
