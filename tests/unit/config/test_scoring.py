"""Jobs whose sources and held-out sets have their own environments or rewards: which plays or scores each."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.explain import explain_errors
from services.broker.admission.review import review_environments, review_free_values, reward_uses
from services.broker.datasets import PromptItem
from services.broker.tasks import build_evaluation_tasks, build_tasks
from services.rollout.episodes.contract import Program
from tests.world import job_body

SUMS = {"type": "jsonl", "path": "sums.jsonl", "name": "sums"}
GAMES = {"type": "jsonl", "path": "games.jsonl", "name": "games", "system_prompt": "Play."}
SHOP, GUESS = {"name": "shop"}, {"name": "guess_number", "options": {"highest": 9}, "max_turns": 2, "max_attempts": 5}
PLAYED = [SUMS, GAMES | {"environment": GUESS}]
EXACT = {"name": "exact"}
HELD_OUT = {"type": "jsonl", "path": "held_out.jsonl"}
SETS = [{"name": "a", "data": HELD_OUT}, {"name": "b", "data": HELD_OUT, "environment": GUESS}]
PARTS = [{"name": "exact"}, {"name": "math"}]
DISTILL = {"objective": {"type": "distill"}, "teacher": {"path": "./teacher"}, "reward": None}


def job(data: Any, **sections: Any) -> JobConfig:
    return JobConfig.model_validate(job_body(data=data, **sections))


def ways(config: JobConfig) -> dict[str, tuple[str | None, list[str]]]:
    """Return the environment and the rewards of each source."""
    names = {source: [reward.name for reward in rewards] for source, rewards in config.rewards_by_source.items()}
    environments = config.environments_by_source
    return {source: (section and section.name, names[source]) for source, section in environments.items()}


@pytest.mark.parametrize(
    ("data", "sections", "expected"),
    [
        (PLAYED, {}, {"sums": (None, ["exact"]), "games": ("guess_number", [])}),
        (PLAYED, {"reward": None, "environment": SHOP}, {"sums": ("shop", []), "games": ("guess_number", [])}),
        (
            [SUMS | {"reward": EXACT}, GAMES],
            {"reward": None, "environment": SHOP},
            {"sums": (None, ["exact"]), "games": ("shop", [])},
        ),
        (
            [SUMS | {"reward": EXACT}, GAMES | {"environment": SHOP}],
            {"reward": None},
            {"sums": (None, ["exact"]), "games": ("shop", [])},
        ),
        (PLAYED, DISTILL, {"sums": (None, []), "games": ("guess_number", [])}),
    ],
    ids=["beside a reward", "beside an environment", "a reward beside it", "nothing for the job", "a teacher alone"],
)
def test_a_source_has_its_own_or_what_the_job_has(data, sections, expected):
    config = job(data, **sections)
    assert ways(config) == expected
    assert JobConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("data", "sections", "sentence"),
    [
        (
            [SUMS, GAMES | {"environment": SHOP, "reward": EXACT}],
            {},
            "data.1.reward: the environment of this source gives the reward; leave out one of the two",
        ),
        (
            PLAYED,
            {"environment": SHOP},
            "reward: the environment gives the reward; leave out [reward] or [environment]",
        ),
        (PLAYED, {"reward": None}, "reward: missing for data.0; name one, or an [environment]"),
        (
            [SUMS | {"environment": SHOP}, GAMES | {"environment": GUESS}],
            {"reward": None, "evaluation": {"data": HELD_OUT}},
            "reward: missing for evaluation; name one",
        ),
        (
            [SUMS | {"reward": EXACT}, GAMES | {"environment": GUESS}],
            {"reward": None, "environment": SHOP},
            "environment: plays nothing, because every source and held-out set has its own reward or environment",
        ),
        (
            PLAYED,
            {"reward": PARTS, "objective": {"type": "grpo", "signal": "part:exact"}},
            "objective.signal: part:exact is a part of several rewards, and the environment of source games gives one; "
            "set data.1.signal to solved or reward",
        ),
        (
            PLAYED,
            {"reward": PARTS, "objective": {"type": "grpo", "advantages_from": "parts"}},
            "objective.advantages_from: parts needs several rewards for every prompt",
        ),
        (
            [SUMS | {"environment": SHOP}, GAMES | {"environment": GUESS}],
            {"rollout": {"overlong_cache": 4}},
            "rollout.overlong_cache: an episode has the limit of tokens in each turn",
        ),
        (
            PLAYED,
            DISTILL | {"evaluation": {"data": HELD_OUT}},
            "evaluation: held-out responses are scored by a reward",
        ),
    ],
)
def test_what_gives_two_rewards_or_none_is_refused(data, sections, sentence):
    with pytest.raises(ValidationError) as refused:
        job(data, **sections)
    (error,) = refused.value.errors()
    assert sentence in error["msg"]
    assert "\n" not in error["msg"]


def test_wrong_keys_of_an_environment_are_named_by_their_source():
    body = job_body(data=[SUMS, GAMES | {"environment": {"max_turn": 2}}])
    with pytest.raises(ValidationError) as refused:
        JobConfig.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in refused.value.errors()]
    explained = dict(explain_errors(errors, body))
    assert explained["data.1.environment.name"].startswith("is required")
    assert "did you mean max_turns?" in explained["data.1.environment.max_turn"]


@pytest.mark.parametrize(
    ("data", "sections"),
    [
        (PLAYED, {"rollout": {"overlong_cache": 4}}),
        (
            [SUMS, PLAYED[1] | {"signal": "reward"}],
            {"reward": PARTS, "objective": {"type": "grpo", "signal": "part:exact"}},
        ),
        (PLAYED, DISTILL | {"rollout": {"truncated": "zero"}}),
    ],
    ids=["a penalty for one turn", "a part for one turn", "a reward from one environment"],
)
def test_what_one_source_can_have_is_taken(data, sections):
    assert job(data, **sections)


def test_record_of_a_job_without_environments_is_as_before():
    body = json.loads(job([SUMS, GAMES], evaluation={"sets": SETS[:1]}).model_dump_json())
    assert not any("environment" in section for section in (*body["data"], *body["evaluation"]["sets"]))


def test_longest_response_is_that_of_the_longest_source():
    assert job([SUMS, GAMES]).longest_response == 8
    assert job(PLAYED).longest_response == 16
    assert job(PLAYED, reward=None, environment=SHOP).longest_response == 16 * 8


def test_prompts_say_which_environment_plays_them():
    config = job(PLAYED)
    items = [PromptItem(text="1", context={}, source=source) for source in ("sums", "games")]
    sums, games = build_tasks(config, 0, items)
    assert (sums.HasField("environment"), sums.reward.name) == (False, "exact")
    assert (games.environment.name, games.environment.max_turns, games.environment.max_attempts) == (
        "guess_number",
        2,
        5,
    )
    assert not games.HasField("reward")
    program = Program.of_config(config.environments_by_source["games"])
    played = games.environment
    assert program == Program(played.name, played.options_json, played.memory_limit_mb)


def test_wire_of_a_job_with_one_environment_is_as_before():
    (task,) = build_tasks(job(HELD_OUT, reward=None, environment=GUESS), 0, [PromptItem(text="1", context={})])
    assert (task.environment.name, task.environment.max_attempts) == ("guess_number", 0)


def test_held_out_sets_have_their_own_environments():
    config = job([SUMS, GAMES], evaluation={"sets": SETS, "num_prompts": 1})
    items = [PromptItem(text="1", context={})] * 2
    first, second = build_evaluation_tasks(config, 0, items)
    assert (first.HasField("environment"), first.reward.name) == (False, "exact")
    assert (second.environment.name, second.HasField("reward")) == ("guess_number", False)
    alone = job(HELD_OUT, reward=None, environment=SHOP, evaluation={"data": HELD_OUT, "num_prompts": 1})
    (task,) = build_evaluation_tasks(alone, 0, items[:1])
    assert (task.environment.name, task.HasField("reward")) == ("shop", False)


def test_rewards_are_reviewed_for_what_they_score():
    config = job(PLAYED, evaluation={"sets": SETS})
    (use,) = reward_uses(config)
    assert (use.field, [field for field, _ in use.data]) == ("reward", ["data.0", "evaluation.sets.0.data"])


def test_every_environment_is_reviewed_by_its_field():
    unknown = {"name": "gues_number", "options": {"x": {1}}}
    config = job([SUMS, GAMES | {"environment": unknown}], evaluation={"sets": [SETS[1] | {"environment": unknown}]})
    complaints = review_environments(config)
    assert [field for field, _ in complaints] == ["data.1.environment.name", "evaluation.sets.0.environment.name"]
    assert "did you mean guess_number?" in complaints[0][1]
    assert [field for field, _ in review_free_values(config)] == [
        "data.1.environment.options",
        "evaluation.sets.0.environment.options",
    ]


def test_system_prompts_of_episodes_need_no_template():
    """An environment sends its own messages, so that its first call shows whether the template takes them."""
    assert not job(PLAYED).has_system_prompt
    assert job([SUMS | {"environment": SHOP}, GAMES]).has_system_prompt
