"""Paths in job files mean one thing, wherever a command is started."""

from pathlib import Path

import pytest

from onbeat.config import JobConfig

JOB = """
model = {{ path = "{path}" }}
data = {{ type = "jsonl", path = "prompts.jsonl" }}
reward = {{ name = "exact" }}
rollout = {{ num_prompts_per_iteration = 1, num_samples_per_prompt = 2, max_response_tokens = 4 }}
schedule = {{ num_iterations = 1 }}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a job file, with a model beside it; the test works elsewhere."""
    (tmp_path / "jobs" / "models" / "mine").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "jobs"


def model_path(folder: Path, path: str, *overrides: str) -> str:
    (folder / "job.toml").write_text(JOB.format(path=path))
    return JobConfig.from_file(folder / "job.toml", overrides=list(overrides)).model.path


def test_relative_model_is_beside_the_job_file(folder):
    for path in ("./models/mine", "../jobs/models/mine", "./models/../models/mine"):
        assert model_path(folder, path) == str(folder / "models" / "mine")
        assert model_path(folder, "org/name", f"model.path={path}") == str(folder / "models" / "mine")


@pytest.mark.parametrize("path", ["bundled:smollm2-135m-instruct", "/models/mine", "~/models/mine", "org/name", "mine"])
def test_other_models_stay_as_they_are(folder, path):
    assert model_path(folder, path) == path


def test_hub_id_that_is_a_folder_too_is_refused(folder):
    with pytest.raises(ValueError, match=r"there is a folder of this name beside the job file; write '\./models/mine'"):
        model_path(folder, "models/mine")
    (folder / "models" / "mine").rmdir()
    assert model_path(folder, "models/mine") == "models/mine"
