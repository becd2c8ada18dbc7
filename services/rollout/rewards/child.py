"""`python -m services.rollout.rewards.child TIMEOUT_S MEMORY_MB` scores responses for the pool that started it.

The rewards are those that the operator installed under the entry-point group `onbeat.rewards`. No request brings code.
A reward is a function `(response, context, **options)` that returns a finite number, or a mapping with the number under
"reward" and its parts under other names; a function `(responses, context, **options)` returns a list of them. None, in
place of a number, is no opinion.
`context` is the prompt's: {"question", "answer", "metadata", ...}.

It speaks JSON lines: one request on stdin, several answers on stdout, each with the request's number.

    -> {"request": 7, "reward": "exact", "options": {}, "context": {"answer": "4"}, "responses": ["4", "5"],
        "positions": [0, 1]}                            responses whose scores are wanted, of the group; absent: all
    <- {"request": 7, "step": "loaded", "takes_group": false}     it is imported, from now on lines have a deadline
    <- {"request": 7, "step": "scored", "position": 0, "reward": 1.0, "parts": {}}
    <- {"request": 7, "step": "failed", "position": 1, "kind": "raised", "message": "..."}   ends the request

The parent limits wall-clock time: it kills this process. The kernel limits CPU time, response by response; a function
of a group has the time of all its responses for the first of these lines.
"""

import functools
import importlib
import inspect
import json
import math
import resource
import sys
import time
from contextlib import suppress
from typing import Any

from onbeat.contracts.installed import REWARDS, load_installed
from onbeat.contracts.reward_functions import takes_group
from onbeat.process.confine import die_with_parent
from services.rollout.children.limits import MAX_MESSAGE, Answers, restrict_this_process, take_protocol_streams
from services.rollout.children.numbers import InvalidReward
from services.rollout.deadlines import LOAD_S
from services.rollout.rewards.builtin import MODULES
from services.rollout.rewards.functions import RewardFunction, score_group, score_response

MAX_OPEN_FILES = 256
# Linux's CPU time of this process by ticks, as RLIMIT_CPU counts it; `process_time` is more exact, and drifts from it.
CLOCK_OF_LIMIT = -8  # (~0 << 3) | CPUCLOCK_PROF, linux/posix-timers.h


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
        kind = "invalid"
        is_of_group = takes_group(reward)
        kind = "options"
        check_options(reward, request["options"])
        send("loaded", takes_group=is_of_group)
        kind = "raised"
        score = score_group if is_of_group else score_response
        num_at_once = len(request["responses"]) if is_of_group else 1
        for position in request.get("positions", range(len(request["responses"]))):
            grant_cpu_time(timeout_s * num_at_once + 1.0)
            send("scored", position=position, **score(reward, request, position))
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


if __name__ == "__main__":
    main()
