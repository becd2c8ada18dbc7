"""Several rewards in one job: their weighted sum, their parts, and both ways to write them."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from services.broker.datasets import PromptItem
from services.broker.tasks import build_tasks
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, Score, weigh
from tests.world import job_body

SEVERAL = [
    {"name": "exact", "weight": 0.9},
    {"name": "regex", "options": {"pattern": "x"}, "weight": 0.1, "part": "form", "max_attempts": 5},
]


def job(reward: Any) -> JobConfig:
    return JobConfig.model_validate(job_body() | {"reward": reward})


def ask(part: str = "", weight: float = 1.0) -> RewardRequest:
    return RewardRequest("any", {}, {}, ["a", "b"], 1.0, 64, 1, weight=weight, part=part)


def test_the_sum_is_weighted_and_each_reward_is_a_part() -> None:
    right, form = [Score(1.0, {}), Score(0.0, {})], [Score(1.0, {"short": 1.0}), Score(-2.0, {})]
    assert weigh([ask("right", 0.9), ask("form", 0.1)], [right, form]) == [
        Score(1.0, {"right": 1.0, "form": 1.0, "form.short": 1.0}),
        Score(-0.2, {"right": 0.0, "form": -2.0}),
    ]


def test_a_single_reward_stays_as_it_is() -> None:
    scores = [Score(0.1, {"short": 1.0}), Score(1 / 3, {})]
    assert weigh([ask()], [scores]) == scores


def test_a_sum_out_of_bounds_is_refused() -> None:
    with pytest.raises(RewardRefused, match=r"response 1: invalid: the weighted sum is 1e\+07.*lower reward.weight"):
        weigh([ask("a", 10.0)], [[Score(1.0, {}), Score(1e6, {})]])


def test_both_forms_are_read_and_written_as_they_came() -> None:
    single, several = job({"name": "exact"}), job(SEVERAL)
    assert [(reward.name, reward.part) for reward in single.rewards] == [("exact", None)]
    assert [(reward.part, reward.weight) for reward in several.rewards] == [("exact", 0.9), ("form", 0.1)]
    for config in (single, several):
        assert JobConfig.model_validate_json(config.model_dump_json()) == config
    assert isinstance(single.model_dump()["reward"], dict)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([], "at least 1 item"),
        ([{"name": "exact"}] * 2, "two rewards are both called exact"),
        ([{"name": "exact", "part": f"p{index}"} for index in range(9)], "should have at most 8 items"),
        ({"name": "exact", "weight": 0.5}, r"write each of them under \[\[reward\]\]"),
        ([{"name": "exact", "part": "a b"}], "String should match"),
    ],
)
def test_rewards_that_mean_two_things_are_refused(reward: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        job(reward)


def test_prompts_carry_one_reward_as_before_or_all_of_several() -> None:
    (alone,) = build_tasks(job({"name": "exact"}), 0, [PromptItem(text="a", context={})])
    assert (alone.reward.name, list(alone.rewards), alone.reward.weight) == ("exact", [], 0.0)
    (task,) = build_tasks(job(SEVERAL), 0, [PromptItem(text="a", context={})])
    assert not task.HasField("reward")  # an earlier rollout refuses it instead of scoring a part
    sent = [(reward.name, reward.part, reward.weight, reward.max_attempts) for reward in task.rewards]
    assert sent == [("exact", "exact", 0.9, 2), ("regex", "form", 0.1, 5)]
    assert json.loads(task.rewards[1].options_json) == {"pattern": "x"}
