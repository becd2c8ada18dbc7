"""The section `[warm_start]` and the objective sft: what is refused in one sentence, and what an iteration is."""

import json
import re

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.explain import explain_errors
from onbeat.config.storage import ForkConfig
from onbeat.contracts.records import RowCounts
from onbeat.streams.records import following_evaluation
from services.broker.admission.review import JobRefused, review_reward, reward_uses, sections_of
from services.broker.admission.warm_start import count_epochs
from tests.world import job_body

START = {"data": {"type": "jsonl", "path": "examples.jsonl"}, "num_rows_per_iteration": 4}
WARM = {"warm_start": START | {"num_iterations": 2}, "schedule": {"num_iterations": 5}}
SFT = {"objective": {"type": "sft"}, "warm_start": START, "data": None, "reward": None, "rollout": None}
SCORED = {"data": {"type": "jsonl", "path": "held_out.jsonl"}, "every_iterations": 1}
SFT_SCORED = SFT | {"evaluation": SCORED, "rollout": {"max_response_tokens": 8, "stop": "\n"}}
HELD_OUT = {"held_out": {"data": START["data"] | {"template_options": {"a": 1}, "as_chat": False}}}
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
    (
        {"warm_start": START | {"num_iterations": 1, "data": START["data"] | {"as_chat": False}}},
        "warm_start.data.as_chat: data.as_chat is for all prompts of the job; leave this out",
    ),
    (
        {"warm_start": START | HELD_OUT | {"num_iterations": 1}},
        "warm_start.held_out.data.template_options: data.template_options is for all prompts of the job",
    ),
    (
        SFT | {"warm_start": START | HELD_OUT},
        "warm_start.held_out.data.as_chat: warm_start.data.as_chat is for all prompts of the job",
    ),
    (
        SFT | {"warm_start": START | {"data": START["data"] | {"as_chat": False, "system_prompt": "Be brief."}}},
        "warm_start.data.system_prompt: needs warm_start.data.as_chat = true",
    ),
    (SFT | {"reward": {"name": "exact"}}, "reward: has no effect with the objective sft"),
    (SFT | {"environment": {"name": "guess_number"}}, "environment: has no effect with the objective sft"),
    (SFT | {"optimizer": {"learning_rate": 1e-4}}, "optimizer.learning_rate: has no effect with the objective sft"),
    (SFT | {"optimizer": {"num_warmup_iterations": 1}}, "optimizer.num_warmup_iterations: has no effect"),
    (SFT | {"optimizer": {"decay": "linear"}}, "optimizer.decay: has no effect with the objective sft"),
    (SFT | {"data": {"type": "jsonl", "path": "prompts.jsonl"}}, "data: the objective sft has no prompts but those of"),
    (
        SFT
        | {"warm_start": START | {"data": START["data"] | {"template_options": {"a": 1}}}}
        | {"data": START["data"]},
        "data: the objective sft has no prompts but those of warm_start.data",
    ),
    (SFT | {"warm_start": START | {"epochs": 2}}, "warm_start.num_iterations: with sft all iterations are supervised"),
    (SFT | {"teacher": {"path": "./t"}}, "teacher: has no effect with the objective sft"),
    (
        SFT | {"training": {"num_updates_per_iteration": 2}},
        "training.num_updates_per_iteration: a supervised iteration is one step",
    ),
    (SFT | {"rollout": {"stop": "\n"}}, "rollout.max_response_tokens: has no effect with the objective sft"),
    (
        SFT_SCORED,
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


@pytest.mark.parametrize(
    ("examples", "field"),
    [
        ({"type": "csv"}, "warm_start.data.type"),
        ({"path": 1}, "warm_start.data.path"),
        ({"now": "soon"}, "warm_start.data.now"),
        ({"prompt_feld": "x"}, "warm_start.data.prompt_feld"),
    ],
)
def test_wrong_examples_of_sft_are_reported_once(examples, field):
    given = body(SFT | {"warm_start": START | {"data": START["data"] | examples}})
    with pytest.raises(ValidationError) as refused:
        JobConfig.model_validate(given)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in refused.value.errors()]
    assert [blamed for blamed, _ in explain_errors(errors, given)] == [field]


def test_every_setting_of_rollouts_is_refused_by_name():
    given = {"max_response_tokens": 8, "stop": "\n", "truncated": "zero"}
    with pytest.raises(ValidationError) as refused:
        JobConfig.model_validate(body(SFT | {"rollout": given}))
    keys = re.findall(r"(rollout\.\w+): has no effect with the objective sft", str(refused.value))
    of_the_fixture = ("num_prompts_per_iteration", "num_samples_per_prompt")  # `job_body` has more of one each
    assert set(keys) == {f"rollout.{key}" for key in (*of_the_fixture, *given)}


def test_sft_needs_no_prompts_reward_or_rollout():
    config = JobConfig.model_validate(body(SFT))
    assert config.num_supervised == config.schedule.num_iterations == 3
    assert not config.has_rollouts
    assert JobConfig.model_validate_json(config.model_dump_json()) == config


def test_chats_of_an_sft_job_get_its_system_prompt():
    data = START["data"] | {"system_prompt": "Be brief."}
    assert (
        JobConfig.model_validate(body(SFT | {"warm_start": START | {"data": data}})).rendering.system_prompt
        == "Be brief."
    )


def test_a_dated_sft_job_is_read_back():
    data = START["data"] | {"messages_field": "turns", "as_chat": False, "control_tokens": "text"}
    config = JobConfig.model_validate(body(SFT | {"warm_start": START | {"data": data}}))
    rendering = config.rendering
    assert (rendering.prompt_field, rendering.as_chat, rendering.control_tokens) == ("turns", False, "text")
    dated = config.dated("2026-01-31T00:00:00Z")
    assert JobConfig.model_validate_json(dated.model_dump_json()) == dated


@pytest.mark.parametrize(
    "sections",
    [
        {"environment": {"name": "guess_number"}},
        {
            "evaluation": {
                "sets": [{"name": "a", "data": SCORED["data"], "environment": {"name": "guess_number"}}],
                "every_iterations": 1,
            }
        },
        {"reward": {"name": "exact"}},
    ],
)
def test_held_out_responses_are_scored_as_in_rl(sections):
    assert JobConfig.model_validate(body(SFT_SCORED | sections)).has_rollouts


def test_rewards_of_sft_score_held_out_data_alone():
    evaluation = {"data": {"type": "reasoning_gym", "task": "chain_sum"}}
    config = JobConfig.model_validate(
        body(SFT_SCORED | {"evaluation": evaluation, "reward": {"name": "reasoning_gym"}})
    )
    (use,) = reward_uses(config)
    assert [field for field, _ in use.data] == ["evaluation.data"]
    assert review_reward(use) == [], "the examples have rows, which this reward cannot score"
    assert [section.field for section in sections_of(config, [use])] == ["warm_start.data", "evaluation.data"]


def test_the_benchmark_of_examples_is_a_job():
    assert JobConfig.from_file("benchmarks/jobs/examples_of_teacher.toml").objective.type == "sft"


def test_only_the_first_iterations_are_supervised():
    sections = WARM | {"training": {"num_updates_per_iteration": 2}}
    config = JobConfig.model_validate(body(sections))
    first, third = config.at(1), config.at(2)
    assert (first.objective.type, third.objective.type) == ("sft", "grpo")
    assert first.rollout.num_prompts_per_iteration == 4
    assert first.training.num_updates_per_iteration == 1
    assert third is config
    assert config.decay_ends == [6], "the schedule of the learning rate begins after the warm start"


@pytest.mark.parametrize(
    ("num_supervised", "every", "evaluated"),
    [(3, 4, [0, 3, 4, 7]), (3, 3, [0, 3, 6, 7]), (3, 1, list(range(8))), (5, 9, [0, 5, 7]), (0, 4, [0, 4, 7])],
)
def test_evaluated_versions_are_the_ends_and_every_few(num_supervised, every, evaluated):
    """The trainer asks whether a version is evaluated, the broker which one is next."""
    warm = {"warm_start": START | {"num_iterations": num_supervised}} if num_supervised else {}
    body = job_body(**warm, schedule={"num_iterations": 7}, evaluation=SCORED | {"every_iterations": every})
    config = JobConfig.model_validate(body)
    assert [version for version in range(8) if config.is_evaluated(version)] == evaluated
    opened = [0]
    while opened[-1] < 7:
        opened.append(following_evaluation(opened[-1], every, 7, config.num_supervised))
    assert opened == evaluated


def test_the_first_version_of_a_fork_is_evaluated():
    config = JobConfig.model_validate(job_body(**WARM, evaluation=SCORED | {"every_iterations": 4}))
    assert config.model_copy(update={"fork": ForkConfig(job="parent", iteration=3)}).is_evaluated(3)
    assert not config.is_evaluated(3)
    assert not JobConfig.model_validate(job_body(**WARM)).is_evaluated(0)


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


def test_a_stored_job_of_a_build_that_accepted_it_is_read():
    """A later build may refuse what had no effect; a job that runs goes on."""
    stored = JobConfig.model_validate(body(SFT)).model_dump(mode="json")
    stored["rollout"]["temperature"] = 0.7
    with pytest.raises(ValidationError, match=r"rollout\.temperature: has no effect with the objective sft"):
        JobConfig.model_validate(stored)
    assert JobConfig.of_job({"config": json.dumps(stored)}).rollout.temperature == 0.7
