"""Functions that score: what they may return, plain and asynchronous, for one response and for a group."""

import asyncio
from decimal import Decimal
from typing import Any

import numpy
import pytest
import torch

from onbeat.contracts.reward_functions import takes_group
from onbeat.environments.final_reward import check_reward, reward_of_answer
from onbeat.environments.types import Task
from services.rollout.children.numbers import InvalidReward
from services.rollout.rewards.functions import score_group, score_response

GROUP = ["a", "bb", "ccc"]


def request(*responses: str) -> dict[str, Any]:
    return {"responses": list(responses), "context": {}, "options": {}}


def scored_group(result: Any) -> list[float]:
    given = request(*GROUP)
    return [score_group(lambda responses, context: result, given, place)["reward"] for place in range(len(GROUP))]


# ---- one response ------------------------------------------------------------------------------------------------


def test_mapping_without_a_reward_is_refused():
    with pytest.raises(InvalidReward, match=r"has no 'reward', only \['1', 'a'\]"):
        score_response(lambda response, context: {1: 2.0, "a": 3.0}, request(""), 0)


async def judge(response: str, context: dict[str, Any]) -> float:
    await asyncio.sleep(0)
    return float(len(response))


def test_asynchronous_reward_is_awaited_in_one_event_loop():
    loops = []

    async def remember(response, context):
        loops.append(asyncio.get_running_loop())
        return await judge(response, context)

    given = request("a", "bb")
    assert [score_response(remember, given, place)["reward"] for place in (0, 1)] == [1.0, 2.0]
    assert loops[0] is loops[1]


def test_error_of_an_asynchronous_reward_is_its_own():
    async def fail(response, context):
        raise KeyError("no such thing")

    with pytest.raises(KeyError, match="no such thing"):
        score_response(fail, request(""), 0)


# ---- a group -----------------------------------------------------------------------------------------------------


def test_group_function_is_known_by_its_first_parameter():
    assert takes_group(lambda responses, context, limit=3: [])
    assert not takes_group(judge)
    with pytest.raises(ValueError, match="`responses` has to be the first one"):
        takes_group(lambda context, responses: [])


def test_group_is_scored_once_and_sees_all_responses():
    calls = []

    async def rank(responses, context):
        calls.append(responses)
        order = sorted(range(len(responses)), key=lambda index: len(responses[index]))
        return [{"reward": float(order.index(index)), "length": len(text)} for index, text in enumerate(responses)]

    given = request(*GROUP)
    scores = [score_group(rank, given, place) for place in range(3)]
    assert scores == [{"reward": float(n), "parts": {"length": n + 1.0}} for n in range(3)]
    assert calls == [GROUP]


@pytest.mark.parametrize(
    "result",
    [[1, 2.0, Decimal(3)], (1, 2, 3), numpy.arange(1, 4), torch.arange(1.0, 4.0), torch.tensor([[1], [2], [3]])],
)
def test_lists_arrays_and_tensors_are_rewards_of_a_group(result):
    assert scored_group(result) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([1.0, 2.0], "it returned 2 rewards for 3 responses; return one for each, in order"),
        (torch.zeros(4), "it returned 4 rewards for 3 responses"),
        (1.0, r"it returned 1.0 \(float\); return a list with a reward for each response"),
        (torch.tensor(1.0), r"it returned tensor.* \(Tensor of shape \(\)\); return a list"),
        ("abc", r"it returned 'abc' \(str\); return a list"),
        ({"reward": 1.0}, r"it returned .* \(dict\); return a list"),
        ([1.0, "2", 3.0], r"response 1: reward is '2' \(str\), not a number"),
        ([1.0, 2.0, {"right": 1.0}], "response 2: the mapping it returned has no 'reward'"),
    ],
)
def test_other_results_for_a_group_are_refused(result, words):
    with pytest.raises(InvalidReward, match=words):
        scored_group(result)


# ---- rewards of an environment -----------------------------------------------------------------------------------


async def test_environment_takes_asynchronous_rewards_and_no_groups(monkeypatch):
    installed = {"judge": judge, "rank": lambda responses, context: []}
    monkeypatch.setattr("onbeat.environments.final_reward.load_installed", lambda group, name: installed[name])
    check_reward("judge")
    with pytest.raises(ValueError, match="the reward rank compares the responses of a group"):
        check_reward("rank")
    task = Task([{"role": "user", "content": "2 + 3 ="}], "2 + 3 =", "5", {}, seed=1)
    assert await reward_of_answer("judge", {}, task, [{"role": "assistant", "content": "five"}]) == 4.0
