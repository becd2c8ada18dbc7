"""The section `[teacher]` and the objective distill: what a submission is refused for, in one sentence."""

import json

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.streams.signal import Signal
from services.broker.admission.teacher import review_teacher
from tests.world import job_body

TEACHER = {"path": "./teacher"}
DISTILL = {"objective": {"type": "distill"}, "teacher": TEACHER}
HINTED = TEACHER | {"prompt_field": "hint"}
TASKS = {"type": "reasoning_gym", "task": "chain_sum"}
ALONE = DISTILL | {"reward": None}
EVALUATION = {"data": {"type": "jsonl", "path": "held_out.jsonl"}, "every_iterations": 1, "num_prompts": 1}
SOURCE = {"type": "jsonl", "path": "rows.jsonl", "name": "a"}
REFUSED = [
    ({"objective": {"type": "distill"}}, "teacher: objective distill learns from one; add a section [teacher]"),
    (
        {"objective": {"type": "online_dpo"}, "teacher": TEACHER},
        "teacher: its gap is added to advantages, which objective online_dpo does not have; use grpo",
    ),
    (
        ALONE | {"rollout": {"max_prompts_per_iteration": 9}},
        "distill learns from every group, so that none is replaced",
    ),
    (
        ALONE | {"rollout": {"truncated": "zero"}},
        "rollout.truncated: changes rewards, and the job has none",
    ),
    (ALONE | {"rollout": {"overlong_cache": 4}}, "rollout.overlong_cache: changes rewards, and the job has none"),
    (DISTILL | {"solved_at": 1.0, "objective": {"type": "distill", "signal": "solved"}}, "objective.signal: distill"),
    (
        DISTILL | {"objective": {"type": "distill", "kl": {"coef": 0.1, "placement": "reward"}}},
        "objective.kl.placement: distill learns from no reward; use placement = 'loss'",
    ),
    (DISTILL | {"data": [SOURCE | {"signal": "reward"}]}, "data.0.signal: distill learns from every group"),
    (ALONE | {"data": SOURCE | {"name": None, "order": "difficulty"}}, "data.order: difficulty chooses by rewards"),
    (ALONE | {"evaluation": EVALUATION}, "evaluation: held-out responses are scored by a reward; add [reward], or"),
    ({"reward": None, "teacher": TEACHER}, "reward: missing; name one, or an [environment]"),
    ({"teacher": TEACHER, "rollout": {"num_samples_per_prompt": 1}}, "grpo needs at least 2 responses per prompt"),
    (
        ALONE | {"teacher": HINTED, "data": TASKS},
        "teacher.prompt_field: data has generated tasks, each with one prompt only",
    ),
    (
        DISTILL | {"teacher": HINTED, "reward": None, "environment": {"name": "guess_number"}},
        "teacher.prompt_field: the environment of data begins its conversations with the policy's prompt",
    ),
    ({"teacher": TEACHER | {"clip": 0.0}}, "greater than 0"),
    ({"teacher": TEACHER | {"divergence": "forward"}}, "'sampled_token' or 'full_vocabulary'"),
    ({"teacher": TEACHER | {"temperature": 2.0}}, "Extra inputs are not permitted"),
]


@pytest.mark.parametrize(("sections", "sentence"), REFUSED)
def test_what_does_not_go_with_a_teacher_is_refused(sections, sentence):
    with pytest.raises(ValidationError) as caught:
        JobConfig.model_validate(job_body(**sections))
    (error,) = caught.value.errors()
    assert sentence in error["msg"]
    assert "\n" not in error["msg"]


@pytest.mark.parametrize(
    "sections",
    [
        ALONE | {"rollout": {"num_samples_per_prompt": 1}},
        DISTILL | {"evaluation": EVALUATION, "rollout": {"truncated": "zero"}},
        ALONE | {"schedule": {"mode": "bounded", "num_iterations": 3}, "lora": {}},
        {"teacher": TEACHER, "rollout": {"max_prompts_per_iteration": 9}},
        ALONE | {"teacher": HINTED},
    ],
)
def test_job_with_a_teacher_is_read_as_it_was_written(sections):
    job = JobConfig.model_validate(job_body(**sections))
    assert JobConfig.model_validate_json(job.model_dump_json()) == job
    record = json.loads(job.model_dump_json())
    assert Signal.of_record(record).rule == Signal.of(job).rule


def test_record_of_a_job_without_a_teacher_has_no_such_key():
    assert "teacher" not in JobConfig.model_validate(job_body()).model_dump(mode="json")
    assert "prompt_field" not in JobConfig.model_validate(job_body(**DISTILL)).model_dump(mode="json")["teacher"]


def test_teacher_beside_the_job_file_is_found_from_everywhere(tmp_path):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job_body(**DISTILL)), encoding="utf-8")
    assert JobConfig.from_file(path).teacher.path == str(tmp_path / "teacher")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/nowhere", "/nowhere is no folder; give a model in Hugging Face layout"),
        ("bundled:none", "no model 'none' is bundled; there is: bundled:smollm2-135m-instruct"),
        ("what is this", "'what is this' is no hub id"),
    ],
)
def test_broker_refuses_a_teacher_that_is_no_model(path, sentence):
    job = JobConfig.model_validate(job_body(**DISTILL | {"teacher": {"path": path}}))
    ((field, message),) = review_teacher(job, has_model_folders=True)
    assert (field, message[: len(sentence)]) == ("teacher.path", sentence)
    assert review_teacher(JobConfig.model_validate(job_body()), has_model_folders=True) == []
