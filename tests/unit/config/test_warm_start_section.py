"""The section `[warm_start]` and the objective sft: what is refused in one sentence, and what an iteration is."""

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.contracts.records import RowCounts
from services.broker.admission.review import JobRefused
from services.broker.admission.warm_start import count_epochs
from tests.world import job_body

START = {"data": {"type": "jsonl", "path": "examples.jsonl"}, "num_rows_per_iteration": 4}
WARM = {"warm_start": START | {"num_iterations": 2}, "schedule": {"num_iterations": 5}}
SFT = {"objective": {"type": "sft"}, "warm_start": START}
REFUSED = [
    ({"objective": {"type": "sft"}}, "warm_start.data: missing; the objective sft learns from examples"),
    ({"warm_start": START}, "warm_start.num_iterations: missing; say how many iterations are supervised"),
    (
        {"warm_start": START | {"num_iterations": 3}},
        "schedule.num_iterations: of 3 iterations 3 are supervised (warm_start), and none is left for RL",
    ),
    (
        {"warm_start": START | {"num_iterations": 2, "epochs": 1}},
        "warm_start.epochs: num_iterations is there, too; leave out one of them",
    ),
    (
        WARM | {"schedule": {"num_iterations": 5, "mode": "bounded"}},
        "schedule.mode: rollouts of bounded generate ahead",
    ),
    (
        {"warm_start": START | {"num_iterations": 1, "data": START["data"] | {"now": "2026-01-31"}}},
        "warm_start.data.now: data.now is for all prompts of the job; leave this out",
    ),
    (SFT | {"warm_start": START | {"epochs": 2}}, "warm_start.num_iterations: with sft all iterations are supervised"),
    (SFT | {"teacher": {"path": "./t"}}, "teacher: has no effect with the objective sft"),
    (
        SFT | {"training": {"num_updates_per_iteration": 2}},
        "training.num_updates_per_iteration: a supervised iteration is one step",
    ),
    (
        SFT
        | {"reward": None, "evaluation": {"data": {"type": "jsonl", "path": "held_out.jsonl"}, "every_iterations": 1}},
        "evaluation: held-out responses are scored by a reward; add [reward]",
    ),
]


def body(sections):
    return {name: value for name, value in job_body(**sections).items() if value is not None}


@pytest.mark.parametrize(("sections", "sentence"), REFUSED)
def test_refusals_are_sentences(sections, sentence):
    with pytest.raises(ValidationError) as refused:
        JobConfig.model_validate(body(sections))
    assert sentence in str(refused.value)


def test_sft_needs_no_prompts_reward_or_rollout():
    job = job_body(**SFT, model={"path": "m"})
    for section in ("data", "reward", "rollout"):
        del job[section]
    config = JobConfig.model_validate(job)
    assert config.num_supervised == config.schedule.num_iterations == 3
    assert not config.has_rollouts
    assert JobConfig.model_validate_json(config.model_dump_json()) == config


def test_only_the_first_iterations_are_supervised():
    sections = WARM | {"training": {"num_updates_per_iteration": 2}}
    config = JobConfig.model_validate(body(sections))
    first, third = config.at(1), config.at(2)
    assert (first.objective.type, third.objective.type) == ("sft", "grpo")
    assert first.rollout.num_prompts_per_iteration == 4
    assert first.training.num_updates_per_iteration == 1
    assert third is config
    assert config.decay_ends == [6], "the schedule of the learning rate begins after the warm start"


def test_a_job_without_a_warm_start_has_no_such_key():
    assert "warm_start" not in JobConfig.model_validate(job_body()).model_dump(mode="json")


def test_epochs_become_iterations_by_the_rows():
    config = JobConfig.model_validate(body({"warm_start": START | {"epochs": 1.5}, "schedule": {"num_iterations": 9}}))
    rows = [RowCounts(field="warm_start.data", path="x", num_accepted=10, num_changed=0, num_refused=0)]
    counted = count_epochs(config, rows)
    assert (counted.num_supervised, counted.warm_start.epochs) == (4, None)
    assert counted.continues(config), "a repeated request returns the job"
    shorter = config.model_copy(update={"schedule": config.schedule.model_copy(update={"num_iterations": 4})})
    with pytest.raises(
        JobRefused, match=r"1\.5 epochs of 10 rows are 4 supervised iterations, and the job has 4 in all"
    ):
        count_epochs(shorter, rows)
