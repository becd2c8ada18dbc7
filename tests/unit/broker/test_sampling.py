"""The sampling of a job: stops for all its prompts, truncated distributions for held-out sets only."""

from typing import Any

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.explain import describe_wrong_job
from services.broker.datasets import PromptItem
from services.broker.tasks import build_evaluation_tasks, build_tasks
from tests.world import job_body

DATA = {"type": "jsonl", "path": "prompts.jsonl"}
ITEM = PromptItem(text="2 + 2 =", context={})


def job(rollout: dict[str, Any] | None = None, **evaluation: Any) -> JobConfig:
    return JobConfig.model_validate(body_of(rollout, evaluation))


def body_of(rollout: dict[str, Any] | None, evaluation: dict[str, Any]) -> dict[str, Any]:
    return job_body(rollout=rollout or {}, evaluation={"data": DATA, "num_prompts": 1} | evaluation)


def test_stops_are_those_of_training_and_evaluation_alike() -> None:
    config = job({"stop": ["\nQ:", "END"], "stop_token_ids": [42]})
    for task in (*build_tasks(config, 0, [ITEM]), *build_evaluation_tasks(config, 0, [ITEM])):
        assert (list(task.stop), list(task.stop_token_ids)) == (["\nQ:", "END"], [42])
    assert job({"stop": "END"}).rollout.stop == ["END"]
    (default,) = build_tasks(job(), 0, [ITEM])
    assert (list(default.stop), list(default.stop_token_ids)) == ([], [])


def test_sampling_of_held_out_sets_is_their_own() -> None:
    sampling = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "min_tokens": 4}
    (task,) = build_evaluation_tasks(job(**sampling), 0, [ITEM])
    assert {name: getattr(task, name) for name in sampling} == sampling
    (trained,) = build_tasks(job(**sampling), 0, [ITEM])
    assert (trained.temperature, trained.HasField("top_p"), trained.top_k, trained.min_p) == (1.0, False, 0, 0.0)
    assert trained.min_tokens == 0
    (greedy,) = build_evaluation_tasks(job(temperature=0), 0, [ITEM])
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("rollout", "evaluation", "sentence"),
    [
        ({"top_p": 0.9}, {}, "rollout.top_p: training samples from the whole distribution"),
        ({"top_k": 5}, {}, "leave it out, or set evaluation.top_k for the held-out sets"),
        ({"min_p": 0.1}, {}, "rollout.min_p: training samples from the whole distribution"),
        ({"min_tokens": 3}, {}, "rollout.min_tokens: training samples from the whole distribution"),
        ({"stop": [""]}, {}, "rollout.stop.0: String should have at least 1 character"),
        ({"stop": [5]}, {}, "rollout.stop.0: Input should be a valid string"),
        ({"stop_token_ids": [-1]}, {}, "rollout.stop_token_ids.0: Input should be greater than or equal to 0"),
        ({"stop_token_ids": ["END"]}, {}, "rollout.stop_token_ids.0: Input should be a valid integer"),
        ({}, {"temperature": 0.001}, "evaluation.temperature: 0.001 is below 0.01"),
        ({}, {"temperature": 0, "num_samples_per_prompt": 4}, "at temperature 0 all 4 responses to a prompt are the"),
        ({}, {"temperature": 0, "top_p": 0.9}, "evaluation.temperature: 0 takes the likeliest token whatever top_p"),
        ({}, {"top_p": 0}, "evaluation.top_p: Input should be greater than 0"),
        ({}, {"min_p": 1}, "evaluation.min_p: Input should be less than 1"),
        ({}, {"min_tokens": 9}, "evaluation.min_tokens: 9 are more than a response may have"),
    ],
)
def test_refusal_says_what_to_do(rollout: dict[str, Any], evaluation: dict[str, Any], sentence: str) -> None:
    body = body_of(rollout, evaluation)
    with pytest.raises(ValidationError) as refused:
        JobConfig.model_validate(body)
    assert sentence in describe_wrong_job(refused.value, body, "job.toml")


def test_all_refused_keys_are_named_at_once() -> None:
    body = body_of({"top_p": 0.9, "top_k": 5}, {})
    with pytest.raises(ValidationError) as refused:
        JobConfig.model_validate(body)
    lines = describe_wrong_job(refused.value, body, "job.toml").splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["rollout.top_p", "rollout.top_k"]
