"""The calls of reward functions, which are foreign code: plain or asynchronous, of one response or of a whole group
(onbeat/contracts/reward_functions.py), and the check of what they return.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from services.rollout.children.numbers import InvalidReward, check_numbers, describe_type

RewardFunction = Callable[..., Any]
Fields = dict[str, Any]  # {"reward": ..., "parts": {...}} of one response


def score_response(function: RewardFunction, request: Fields, position: int) -> Fields:
    """Score the response at this position of the request. Raises InvalidReward for what is no reward, and what the
    function raises."""
    response = request["responses"][position]
    return read_score(settle(function(response, request["context"], **request["options"])))


def score_group(function: RewardFunction, request: Fields, position: int) -> Fields:
    """Score all responses of the request at its first position, and return the score at this one. Raises as
    `score_response`."""
    if "scores" not in request:
        result = settle(function(list(request["responses"]), request["context"], **request["options"]))
        request["scores"] = read_scores(result, len(request["responses"]))
    score: Fields = request["scores"][position]
    return score


def read_scores(result: Any, num_responses: int) -> list[Fields]:
    """Return the rewards of a group, in order. Raises InvalidReward."""
    if not isinstance(result, list | tuple) and getattr(result, "ndim", 0) == 0:
        kind = describe_type(result)
        raise InvalidReward(f"it returned {result!r:.200} ({kind}); return a list with a reward for each response")
    if len(result) != num_responses:
        message = f"it returned {len(result)} rewards for {num_responses} responses; return one for each, in order"
        raise InvalidReward(message)
    scores = []
    for index, score in enumerate(result):
        try:
            scores.append(read_score(score))
        except InvalidReward as error:
            raise InvalidReward(f"response {index}: {error}") from error
    return scores


def read_score(result: Any) -> Fields:
    """Return the reward, None for no opinion, and the parts on which there is one. Raises InvalidReward."""
    parts = dict(result) if isinstance(result, Mapping) else {"reward": result}
    if "reward" not in parts:
        raise InvalidReward(f"the mapping it returned has no 'reward', only {sorted(map(str, parts))}")
    values = check_numbers({name: value for name, value in parts.items() if value is not None})
    return {"reward": values.pop("reward", None), "parts": values}


def settle(result: Any) -> Any:
    """Return the result of a plain function, or wait for that of an asynchronous one."""

    async def wait() -> Any:
        return await result

    return event_loop().run(wait()) if inspect.isawaitable(result) else result


@functools.cache
def event_loop() -> asyncio.Runner:
    """Return the event loop of all calls, so that a reward may keep a client from one call to the next."""
    return asyncio.Runner()
