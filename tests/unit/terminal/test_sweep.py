"""`onbeat sweep`: which jobs it makes, that it makes none twice, and the table at its end."""

import json
import re
from pathlib import Path

import pytest

from onbeat.config import JobConfig
from onbeat.config.variations import MAX_JOBS, vary
from onbeat.contracts.states import JobState
from onbeat.terminal.sweep import Outcome, table
from tests.unit.terminal.conftest import Command
from tests.unit.terminal.test_report import JOB
from tests.world import job_body

RATES = "optimizer.learning_rate=1e-5,3e-5"


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.terminal.sweep.LOOK_S", 0.05)


@pytest.fixture
def short_job(job_file: str) -> str:
    Path(job_file).write_text(json.dumps(job_body(schedule={"num_iterations": 2})), "utf-8")
    return job_file


@pytest.mark.usefixtures("trainer")
def test_sweep_runs_every_combination_once_and_comes_back_to_it(onbeat: Command, short_job: str) -> None:
    command = ("sweep", short_job, "--vary", RATES, "--seeds", "2")
    printed = onbeat(*command)
    assert "4 of 4 are over" in printed.err
    title, *rows = [line.split() for line in printed.out.splitlines()]
    assert title[:3] == ["OPTIMIZER.LEARNING_RATE", "SEED", "REWARD"]
    assert [line[:3] for line in rows] == [
        ["1e-5", "0", "0.050"],
        ["1e-5", "1", "0.050"],
        ["1e-5", "mean", "0.050"],
        ["3e-5", "0", "0.050"],
        ["3e-5", "1", "0.050"],
        ["3e-5", "mean", "0.050"],
    ]
    assert rows[2][3:] == ["±", "0.000"]
    ids = re.findall(r"job-\w+", printed.out)
    jobs = {job["id"]: job for job in json.loads(onbeat("jobs", "list", "--json").out)}
    assert jobs.keys() == set(ids)
    assert [jobs[job_id]["name"] for job_id in ids[:2]] == [f"test-learning_rate-1e-5-seed-{seed}" for seed in (0, 1)]
    assert jobs[ids[3]]["config"]["optimizer"]["learning_rate"] == 3e-5
    assert jobs[ids[3]]["config"]["seed"] == 1

    again = json.loads(onbeat(*command, "--json").out)["jobs"]
    assert [job["id"] for job in again] == ids
    assert again[3]["varied"] == {"optimizer.learning_rate": "3e-5", "seed": "1"}
    assert again[3]["reward_mean"] == pytest.approx(0.05)
    assert len(json.loads(onbeat("jobs", "list", "--json").out)) == 4


@pytest.mark.usefixtures("broker")
def test_sweep_with_a_wrong_value_creates_no_job(onbeat: Command, short_job: str) -> None:
    error = onbeat("sweep", short_job, "--vary", "optimizer.learning_rate=1e-5,-1", code=2).err
    assert "no job was created, because of test-learning_rate--1: " in error
    assert "optimizer.learning_rate: Input should be greater than 0" in error
    assert json.loads(onbeat("jobs", "list", "--json").out) == []
    assert "nothing to vary: add --vary" in onbeat("sweep", short_job, code=2).err


def test_wrong_variations_are_refused() -> None:
    for varied, num_seeds, reason in (
        (["optimizer.learning_rate"], 1, "expected key=value,value, such as"),
        (["seed=1,2"], 2, "both set the seed"),
        (["seed=1,1"], 1, "a value is there twice"),
        (["seed=1,2", "seed=3"], 1, "a key is varied twice"),
        (["optimizer.betas=[0.9,0.95"], 1, "is no value of TOML"),
        (["seed=" + ",".join(map(str, range(MAX_JOBS + 1)))], 1, "vary less at a time"),
    ):
        with pytest.raises(ValueError, match=reason):
            vary(job_body(), varied, num_seeds)


def test_names_of_a_sweep_are_valid_and_differ() -> None:
    texts = ["reward.name=exact,math", "evaluation.data.path=" + ",".join(f"{'long' * 30}{end}" for end in "ab")]
    variations = vary(job_body(), texts, num_seeds=2)
    names = {variation.job["name"] for variation in variations}
    assert len(names) == len(variations) == 8
    assert {JobConfig.model_validate(job_body(name=name)).name for name in names} == names
    assert len({variation.idempotency_key for variation in variations}) == 8
    assert job_body()["name"] == "test"


def test_table_has_a_mean_of_the_seeds_that_have_a_reward() -> None:
    failed = JOB.model_copy(update={"state": JobState.FAILED, "started_at": None})
    outcomes = [
        Outcome({"gac.mode": "off", "seed": "0"}, JOB, 0.4, 0.3),
        Outcome({"gac.mode": "off", "seed": "1"}, JOB, 0.6, 0.5),
        Outcome({"gac.mode": "off", "seed": "2"}, failed, None, None),
    ]
    titles, rows = table(outcomes)
    assert titles == ["gac.mode", "seed", "reward (last 5)", "held out", "state", "iterations", "time", "id"]
    assert rows[2][:7] == ["off", "2", "-", "-", "FAILED", f"{JOB.next_iteration}/{JOB.num_iterations}", "-"]
    assert rows[3] == ["off", "mean", "0.500 ± 0.141", "0.400 ± 0.141", "", "", "", ""]
