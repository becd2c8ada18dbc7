"""`python -m services.rollout.rewards.child MEMORY_LIMIT_MB`: scores responses for the pool that started it.

JSON lines, one request on stdin, several answers on stdout:

    -> {"reward": "exact", "options": {}, "context": {"answer": "4"}, "responses": ["4", "5"]}
    <- {"loaded": true}                                      the reward is imported, from now on lines have a deadline
    <- {"position": 0, "reward": 1.0, "parts": {}}
    <- {"position": 1, "kind": "raised", "message": "..."}   ends the request

Time is the parent's business: it kills.
"""

import ctypes
import json
import math
import numbers
import os
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any, TextIO

from services.rollout.rewards.registry import RewardFunction, load_reward

MEBIBYTE = 1 << 20
MAX_MESSAGE = 500  # characters of an error that travel to the parent
PR_SET_PDEATHSIG = 1


class InvalidReward(Exception):
    """A reward returned something that is no finite number."""


def main() -> None:
    requests, answers = take_protocol_streams()
    die_with_parent()
    limit_bytes = int(sys.argv[1]) * MEBIBYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    for line in requests:
        answer_request(json.loads(line), answers)


def take_protocol_streams() -> tuple[TextIO, TextIO]:
    """Keep stdin and stdout for the protocol; what user code reads is empty, what it prints goes to stderr."""
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent dies; elsewhere than on Linux the end of stdin has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def answer_request(request: dict[str, Any], answers: TextIO) -> None:
    position, kind = 0, "load"
    try:
        reward = load_reward(request["reward"])
        send(answers, {"loaded": True})
        kind = "raised"
        for position, response in enumerate(request["responses"]):
            send(answers, {"position": position, **score(reward, response, request)})
    except MemoryError:
        send(answers, {"position": position, "kind": "memory", "message": "the memory limit was reached"})
    except InvalidReward as error:
        send(answers, {"position": position, "kind": "invalid", "message": str(error)[:MAX_MESSAGE]})
    except Exception as error:  # noqa: BLE001  the reward is foreign code and may raise anything
        message = f"{type(error).__name__}: {error}"
        send(answers, {"position": position, "kind": kind, "message": message[:MAX_MESSAGE]})


def score(reward: RewardFunction, response: str, request: dict[str, Any]) -> dict[str, Any]:
    result = reward(response, request["context"], **request["options"])
    parts = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if "reward" not in parts:
        raise InvalidReward(f"the mapping it returned has no 'reward', only {sorted(parts)}")
    for name, value in parts.items():
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise InvalidReward(f"{name} is {value!r}, not a finite number")
    values = {str(name): float(value) for name, value in parts.items()}
    return {"reward": values.pop("reward"), "parts": values}


def send(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer, allow_nan=False) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
