"""`python -m services.rollout.rewards.child TIMEOUT_S MEMORY_MB` scores responses for the pool that started it.

The rewards are those that the operator installed under the entry-point group `onbeat.rewards`. No request brings code.
A reward is a function `(response, context, **options)` that returns a finite number, or a mapping with the number under
"reward" and its parts under other names. `context` is the prompt's: {"question", "answer", "metadata", ...}.

It speaks JSON lines: one request on stdin, several answers on stdout, each with the request's number.

    -> {"request": 7, "reward": "exact", "options": {}, "context": {"answer": "4"}, "responses": ["4", "5"]}
    <- {"request": 7, "step": "loaded"}                 the reward is imported, from now on lines have a deadline
    <- {"request": 7, "step": "scored", "position": 0, "reward": 1.0, "parts": {}}
    <- {"request": 7, "step": "failed", "position": 1, "kind": "raised", "message": "..."}   ends the request
    <- {"request": 7, "step": "worn"}                   ends it, too: score the rest elsewhere

The parent limits wall-clock time: it kills this process.
"""

import functools
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from onbeat.confine import die_with_parent
from onbeat.installed import REWARDS, load_installed
from services.rollout.children.limits import MAX_MESSAGE, Answers, restrict_this_process, take_protocol_streams
from services.rollout.children.numbers import InvalidReward, check_numbers
from services.rollout.rewards.limits import LOAD_S, MAX_OPEN_FILES, CpuBudget, Limits

RewardFunction = Callable[..., float | Mapping[str, float]]


def main() -> None:
    requests, answers = take_protocol_streams()
    die_with_parent()
    limits = Limits.from_arguments(*sys.argv[1:])
    restrict_this_process(limits.memory_mb, MAX_OPEN_FILES)
    scorer = ChildScorer(limits, answers)
    for line in requests:
        scorer.answer(json.loads(line))


class ChildScorer:
    """A scorer answers requests one after the other, each response within its CPU time."""

    def __init__(self, limits: Limits, answers: Answers) -> None:
        self._limits, self._budget, self._answers = limits, CpuBudget(limits), answers
        self._is_new = True  # a process that has scored nothing is never worn, or nothing would be scored

    def answer(self, request: dict[str, Any]) -> None:
        position, kind, send = 0, "load", functools.partial(self._answers.send, request["request"])
        try:
            self._budget.grant(LOAD_S)
            reward = load_reward(request["reward"])
            kind = "options"
            check_options(reward, request["options"])
            send("loaded")
            kind = "raised"
            for position, response in enumerate(request["responses"]):
                if self._budget.is_worn and not self._is_new:
                    send("worn")
                    return
                self._budget.grant(self._limits.response_cpu_s)
                send("scored", position=position, **score(reward, response, request))
                self._is_new = False
        except MemoryError:
            send("failed", position=position, kind="memory", message="the memory limit was reached")
        except InvalidReward as error:
            send("failed", position=position, kind="invalid", message=str(error)[:MAX_MESSAGE])
        except Exception as error:  # noqa: BLE001  the reward is foreign code and may raise anything
            message = f"{type(error).__name__}: {error}".encode(errors="replace").decode()  # no halves of characters
            send("failed", position=position, kind=kind, message=message[:MAX_MESSAGE])


def load_reward(name: str) -> RewardFunction:
    """Import the reward. Raises ValueError, naming the installed ones, if it is unknown, or what the import raises."""
    reward: RewardFunction = load_installed(REWARDS, name)
    return reward


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
