"""The moment that prompts take for now is recorded when a job is created, and stays with it and its forks."""

from onbeat.config import JobConfig
from onbeat.config.templates import moment_of
from onbeat.contracts.states import JobState
from tests.integration.broker.test_fork import FIRST, parent_of
from tests.world import job_body


async def test_date_of_prompts_is_recorded_with_the_job(broker, ledger):
    headers = {"Idempotency-Key": "once"}
    job = (await broker.post("/v1/jobs", json=job_body(), headers=headers)).json()
    now = job["config"]["data"]["now"]
    assert moment_of(job["created_at"] - 60) < now <= moment_of(job["created_at"])
    again = await broker.post("/v1/jobs", json=job_body(), headers=headers)
    assert (again.status_code, again.json()["id"]) == (201, job["id"])
    other = job_body(data=job_body()["data"] | {"now": "2026-01-31"})
    assert (await broker.post("/v1/jobs", json=other, headers=headers)).status_code == 409
    await ledger.jobs.move(job["id"], JobState.CANCELLED)
    assert (await broker.post(f"/v1/jobs/{job['id']}:resume")).json()["config"]["data"]["now"] == now


async def test_fork_has_the_date_of_its_parent(broker, ledger, tmp_path):
    parent = await parent_of(broker, ledger, tmp_path, FIRST)
    config = JobConfig.without_derived((await broker.get(f"/v1/jobs/{parent}")).json()["config"])
    config |= {"fork": {"job": parent, "iteration": FIRST}, "data": config["data"] | {"now": "2026-01-31"}}
    fork = (await broker.post("/v1/jobs", json=config)).json()
    assert fork["config"]["data"]["now"] == "2026-01-31T00:00:00Z"
    config = JobConfig.without_derived(fork["config"])
    assert (await broker.post("/v1/jobs", json=config)).json()["config"]["data"]["now"] == "2026-01-31T00:00:00Z"
