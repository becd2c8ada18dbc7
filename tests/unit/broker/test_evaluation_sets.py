"""Several held-out sets in one job: prompts, rewards and scores of each, and the only set as before."""

from typing import Any

import pytest
from pydantic import ValidationError

from onbeat.client.datasets import take_local_files
from onbeat.config import JobConfig
from onbeat.streams.codec import Response, RolloutGroup
from services.broker.datasets import PromptItem
from services.broker.evaluations import describe, score_sets, split
from services.broker.tasks import build_evaluation_tasks
from tests.broker_fixtures import write_prompts
from tests.world import job_body

DATA = {"type": "jsonl", "path": "prompts.jsonl"}
EASY = {"name": "easy", "data": DATA, "num_prompts": 2}
HARD = {"name": "hard", "data": DATA, "reward": [{"name": "math", "weight": 2.0}], "solved_at": 2.0}


def job(**evaluation: Any) -> JobConfig:
    return JobConfig.model_validate(job_body(evaluation=evaluation))


def group_of(place: int, *rewards: float) -> RolloutGroup:
    responses = [Response(token_ids=[1], reward=reward, finish_reason="stop") for reward in rewards]
    return RolloutGroup(group_id=f"eval-10-{place}", responses=responses)


def test_the_only_set_has_no_name():
    (held_out,) = job(data=DATA, num_prompts=3).held_out
    assert (held_out.name, held_out.field, held_out.num_prompts, held_out.solved_at) == ("", "evaluation", 3, 1.0)
    assert [reward.name for reward in held_out.rewards] == ["exact"]
    assert JobConfig.model_validate(job_body()).held_out == []


def test_a_set_has_the_rest_from_the_job():
    config = job(sets=[EASY, HARD], num_prompts=3)
    known = [(held_out.name, held_out.num_prompts, held_out.solved_at) for held_out in config.held_out]
    assert known == [("easy", 2, 1), ("hard", 3, 2)]
    assert [[reward.name for reward in held_out.rewards] for held_out in config.held_out] == [["exact"], ["math"]]
    assert JobConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({}, r"evaluation\.data: give the data of one set, or several"),
        ({"data": DATA, "sets": [EASY]}, r"evaluation\.data: give the data of one set, or several"),
        ({"sets": [EASY, EASY]}, "easy is the name of two sets"),
        ({"sets": [EASY | {"name": "reward"}]}, "reward is the name of two sets or of other scores"),
        ({"sets": [EASY, EASY | {"name": "more", "num_prompts": 9999}]}, "10001 in all sets together"),
    ],
)
def test_sets_that_mean_two_things_are_refused(evaluation, message):
    with pytest.raises(ValidationError, match=message):
        job(**evaluation)


def test_prompts_of_a_set_carry_its_reward_and_own_seeds():
    items = [PromptItem(text=f"prompt {index}", context={}) for index in range(5)]
    tasks = build_evaluation_tasks(job(sets=[EASY, HARD], num_prompts=3), 10, items)
    assert [task.group_id for task in tasks] == [f"eval-10-{index}" for index in range(5)]
    assert [task.reward.name or task.rewards[0].name for task in tasks] == ["exact"] * 2 + ["math"] * 3
    assert len({task.seed for task in tasks}) == 5
    fewer = build_evaluation_tasks(job(sets=[EASY | {"num_prompts": 1}, HARD], num_prompts=3), 10, items[1:])
    assert [task.seed for task in fewer[1:]] == [task.seed for task in tasks[2:]]  # the other sets do not change it


def test_each_set_has_scores_and_the_first_stands_for_all():
    sets = job(sets=[EASY, HARD], num_prompts=3, num_samples_per_prompt=2).held_out
    groups = [group_of(3, 2.0, 0.0), group_of(0, 1.0, 0.0), group_of(1, 0.0, 0.0), group_of(4, 0.0, 0.0), group_of(2)]
    groups[0].responses[0].reward_parts["form"] = 1.0
    scores = score_sets(split(groups, sets), sets, {"hard/reward/form_mean"})
    assert (scores["reward_mean"], scores["easy/reward_mean"], scores["hard/reward_mean"]) == (0.25, 0.25, 0.5)
    assert (scores["easy/pass_at_k"], scores["hard/pass_at_k"]) == (0.5, 0.5)
    assert scores["hard/reward/form_mean"] == 1.0
    assert "reward/form_mean" not in scores
    assert describe(scores) == "reward 0.250 easy, 0.500 hard"


def test_words_for_one_set_and_for_none():
    sets = job(data=DATA).held_out
    assert describe(score_sets([[group_of(0, 1.0)]], sets, ())) == "reward 1.000"
    assert describe(score_sets([[group_of(0)]], sets, ())) == "no group could be scored"


def test_files_of_all_sets_are_found_beside_the_job(tmp_path):
    write_prompts(tmp_path)
    body = job_body(evaluation={"sets": [EASY, HARD]})
    files = take_local_files(body, tmp_path)
    assert {file.source for file in files} == {tmp_path / "prompts.jsonl"}
    assert [section["data"]["path"] for section in body["evaluation"]["sets"]] == [files[0].path] * 2
    with pytest.raises(ValueError, match=r"path: there is no file"):
        take_local_files(job_body(evaluation={"sets": [EASY]}), tmp_path / "elsewhere", tmp_path / "data")
