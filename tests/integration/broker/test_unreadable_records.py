"""Records in Redis that somebody else has written: each request about the job names the field, and lists go on."""

import pytest

from onbeat.streams.keys import JobKeys
from onbeat.streams.unreadable import find_unreadable
from tests.broker_fixtures import running_broker

ROUTES = ("metrics", "timeline", "evaluations", "weights", "iterations", "samples", "audit")
NUMBERED = "iteration", "evaluation", "weights", "busy", "advantages"
BROKEN = [  # record, field, value, the beginning of the problem
    ("job", "config", "{", 'is "{": invalid JSON'),
    ("job", "config", "[]", "is []: input should be"),
    ("job", "config", "{}", "is missing"),
    ("job", "state", "ASLEEP", 'is "ASLEEP": input should be'),
    ("job", "num_opened", "many", 'is "many": input should be a valid integer'),
    ("job", "max_staleness", "1e999", 'is "1e999": input should be a valid integer'),
    ("job", "created_at", "today", 'is "today": input should be a valid number'),
    ("job", "policy_version", "", 'is "": input should be a valid integer'),
    ("iteration", "metrics", "nan?", 'is "nan?": invalid JSON'),
    ("iteration", "metrics", "[1]", "is [1]: input should be"),
    ("iteration", "metrics", "[" * 5000, 'is "[[[['),
    ("iteration", "opened_at", "early", 'is "early": input should be a valid number'),
    ("iteration", "state", "AJAR", 'is "AJAR": input should be'),
    ("busy", "w1", "long", 'is "long": input should be a valid number'),
    ("advantages", "0-0", "{", 'is "{": invalid JSON'),
    ("weights", "published", "[]", "is []: input should be"),
    ("weights", "rollout:w1", "fast", 'is "fast": invalid JSON'),
]
# Read with the group, which is not accepted here, and in a queue.
NOT_SHOWN = {("advantages", "0-0"), ("job", "created_at")}


@pytest.fixture
async def job(world, ledger):
    """Return a job with an iteration, its weights and a rollout's times."""
    job_id, _ = await world.open_job()
    return JobKeys(job_id)


async def break_field(ledger, job, record, field, value):
    key = getattr(job, record)
    await ledger.redis.hset(key(0) if record in NUMBERED else key, field, value)


@pytest.mark.parametrize(("record", "field", "value", "problem"), BROKEN)
async def test_field_is_found_by_its_key_and_name(ledger, job, record, field, value, problem):
    assert await find_unreadable(ledger, job.job_id) is None
    await break_field(ledger, job, record, field, value)
    unreadable = await find_unreadable(ledger, job.job_id)
    assert unreadable is not None
    assert unreadable.key == (getattr(job, record)(0) if record in NUMBERED else getattr(job, record))
    assert unreadable.field.startswith(field)
    assert unreadable.problem.startswith(problem)


@pytest.mark.parametrize(("record", "field", "value", "problem"), BROKEN)
async def test_each_answer_names_the_field_or_does_not_need_it(
    ledger, tmp_path, caplog, job, record, field, value, problem
):
    await break_field(ledger, job, record, field, value)
    unreadable = await find_unreadable(ledger, job.job_id)
    async with running_broker(ledger, tmp_path, is_read_only=True) as broker:
        answers = {route: await broker.get(f"/v1/jobs/{job.job_id}/{route}") for route in ROUTES}
        answers["explain"] = await broker.get(f"/v1/jobs/{job.job_id}:explain")
        others = [await broker.get(path) for path in ("/v1/jobs", f"/v1/jobs/{job.job_id}", "/v1/doctor", "/metrics")]
    assert [answer.status_code for answer in others] == [200] * 4
    refused = [answer.json() for answer in answers.values() if answer.status_code != 200]
    assert all(answer["title"] == "Unreadable record" for answer in refused), refused
    assert all(str(unreadable) in answer["detail"] for answer in refused), refused
    assert refused or (record, field) in NOT_SHOWN
    if field == "num_opened":
        assert str(unreadable) in others[1].json()["error"]
        assert any(str(unreadable) in finding["sentence"] for finding in others[2].json()["findings"])
    assert "Traceback" not in caplog.text


async def test_defect_of_the_broker_is_none_of_the_record(ledger, tmp_path, job, monkeypatch):
    monkeypatch.setattr("services.broker.api.jobs.read_iterations", lambda *_, **__: 1 / 0)
    async with running_broker(ledger, tmp_path, is_read_only=True) as broker:
        answer = await broker.get(f"/v1/jobs/{job.job_id}/iterations")
    assert (answer.status_code, answer.json()["title"]) == (500, "Internal error")
