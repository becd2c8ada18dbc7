"""The values of a job that are not the defaults, which its report shows."""

import pytest

from onbeat.config import JobConfig
from onbeat.config.differences import as_lines, differences
from tests.world import job_body

NEEDED = {
    "name": "test",
    "model.path": "bundled:smollm2-135m-instruct",
    "data.type": "jsonl",
    "data.path": "prompts.jsonl",
    "reward.name": "exact",
    "rollout.num_prompts_per_iteration": 2,
    "rollout.num_samples_per_prompt": 2,
    "rollout.max_response_tokens": 8,
    "schedule.num_iterations": 3,
}


@pytest.mark.parametrize(
    ("sections", "more"),
    [
        pytest.param({}, {}, id="only what a job needs"),
        pytest.param({"seed": 0, "schedule": {"mode": "periodic"}}, {}, id="a default that the job names"),
        pytest.param({"schedule": {"mode": "bounded", "max_staleness": 2}}, {"schedule.mode": "bounded"}, id="a mode"),
        pytest.param({"optimizer": {"learning_rate": 2e-6}}, {"optimizer.learning_rate": 2e-6}, id="a value"),
        pytest.param({"lora": {"rank": 4}}, {"lora.rank": 4}, id="a section that is off by default"),
        pytest.param({"objective": {"type": "rloo"}}, {"objective.type": "rloo"}, id="another objective"),
        pytest.param({"tracking": [{"type": "wandb"}]}, {"tracking.0.type": "wandb"}, id="a list of tables"),
    ],
)
def test_differences_are_what_the_job_sets(sections: dict[str, object], more: dict[str, object]) -> None:
    config = JobConfig.model_validate(job_body(**sections)).model_dump(mode="json")
    different = differences(config)
    assert different.items() >= (NEEDED | more).items()
    assert all(key in NEEDED or key.partition(".")[0] in sections for key in different)


def test_job_of_another_version_is_shown_whole() -> None:
    config = JobConfig.model_validate(job_body()).model_dump(mode="json") | {"later": {"key": 1}}
    assert differences(config)["later.key"] == 1
    assert differences(config)["seed"] == 0


def test_lines_are_toml() -> None:
    assert as_lines({"a.b": "x", "c": [1, 2.5], "d": True}) == ['a.b = "x"', "c = [1, 2.5]", "d = true"]
