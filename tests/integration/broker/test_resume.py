"""Jobs that are over go on: which may, with what, and that brokers, trainers and readers see them as before."""

import json
import uuid

import pytest

from onbeat.config import JobConfig
from onbeat.config.schedule import MAX_NUM_ITERATIONS
from onbeat.contracts.errors import CannotResume, LeaseLost
from onbeat.contracts.states import JobState
from onbeat.streams import keys
from services.broker.retention import Retention
from tests.broker_fixtures import submit
from tests.waiting import eventually
from tests.world import job_body, tasks_for


async def test_failed_job_goes_on_where_it_was(broker, ledger, world):
    job_id = await submit(broker)
    zombie = await world.start_training(job_id)
    await world.train(job_id, zombie, range(1))
    await ledger.jobs.move(job_id, JobState.FAILED, "the disk is full")
    assert job_id in await ledger.lists.newest(JobState.FAILED, 0, 1000)
    record = (await broker.post(f"/v1/jobs/{job_id}:resume")).json()
    assert (record["state"], record["error"], record["next_iteration"]) == ("PENDING", None, 1)
    assert record["finished_at"] is None
    assert job_id not in await ledger.lists.newest(JobState.FAILED, 0, 1000)
    with pytest.raises(LeaseLost):
        await ledger.trainer.renew_job(job_id, zombie, 30.0)
    epoch = await ledger.trainer.claim_job(job_id, "trainer-b", 30.0)
    assert epoch is not None
    await world.train(job_id, epoch, range(1, 3))
    await ledger.jobs.move(job_id, JobState.SUCCEEDED, epoch=epoch)
    assert (await broker.get(f"/v1/jobs/{job_id}/audit")).json()["is_clean"]
    iterations = (await broker.get(f"/v1/jobs/{job_id}/iterations")).json()["iterations"]
    assert [record["state"] for record in iterations] == ["COMMITTED"] * 3


async def test_job_that_succeeded_makes_more_iterations_when_asked(broker, ledger, world):
    evaluation = {"data": {"type": "jsonl", "path": "prompts.jsonl"}, "every_iterations": 2, "num_prompts": 1}
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    job_id = (await broker.post("/v1/jobs", json=job_body(evaluation=evaluation), headers=headers)).json()["id"]
    epoch = await world.start_training(job_id)
    await world.train(job_id, epoch, range(3))
    await eventually("the last evaluation is open", lambda: ledger.evaluations.state(job_id, 3))
    await world.drain(job_id)
    await ledger.jobs.move(job_id, JobState.SUCCEEDED, epoch=epoch)
    for wanted in (1, 3, MAX_NUM_ITERATIONS + 1):
        answer = await broker.post(f"/v1/jobs/{job_id}:resume", json={"num_iterations": wanted})
        assert answer.status_code == 422
        too_few = f"the job has done 3 iterations; give a larger total, got {wanted}"
        assert (too_few if wanted <= 3 else "less than or equal to 1000000") in answer.text
    record = (await broker.post(f"/v1/jobs/{job_id}:resume", json={"num_iterations": 6})).json()
    assert (record["state"], record["num_iterations"], record["next_iteration"]) == ("PENDING", 6, 3)
    created = await broker.post("/v1/jobs", json=job_body(evaluation=evaluation), headers=headers)
    assert (created.status_code, created.json()["id"]) == (201, job_id)  # the request that created it, again
    assert (record["config"]["schedule"]["num_iterations"], record["config"]["schedule"]["earlier_ends"]) == (6, [3])
    assert (await ledger.jobs.fields(job_id))["next_evaluation"] == "4"
    epoch = await ledger.trainer.claim_job(job_id, "trainer-b", 30.0)
    assert epoch is not None
    again = await broker.post(f"/v1/jobs/{job_id}:resume", json={"num_iterations": 6})
    assert (again.status_code, again.json()["num_iterations"]) == (200, 6)
    await world.train(job_id, epoch, range(3, 6))
    await ledger.jobs.move(job_id, JobState.SUCCEEDED, epoch=epoch)
    report = (await broker.get(f"/v1/jobs/{job_id}/audit")).json()
    assert (report["violation"], report["num_commits"]) == (None, 6)
    evaluations = (await broker.get(f"/v1/jobs/{job_id}/evaluations")).json()["evaluations"]
    assert [record["evaluation"] for record in evaluations][:3] == [0, 2, 3]


@pytest.mark.parametrize(
    ("way", "body", "reason"),
    [
        ([JobState.RUNNING, JobState.SUCCEEDED], None, "all of its 3 iterations are done; ask for more: `onbeat jobs"),
        ([JobState.RUNNING], {"num_iterations": 9}, "only a job that SUCCEEDED can get more iterations"),
        ([JobState.FAILED], {"num_iterations": 9}, "resume it without more iterations first"),
    ],
)
async def test_refusal_says_what_to_do(broker, ledger, way, body, reason):
    job_id = await submit(broker)
    await ledger.trainer.claim_job(job_id, "trainer-a", 30)
    for state in way:
        if state is not JobState.RUNNING:
            await ledger.jobs.move(job_id, state)
    before = await ledger.jobs.fields(job_id)
    answer = await broker.post(f"/v1/jobs/{job_id}:resume", json=body)
    assert answer.status_code == 409, answer.text
    assert reason in answer.json()["detail"]
    assert (await ledger.jobs.fields(job_id))["state"] == before["state"]


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"iterations": 5}, "iterations", "is no key of this request; /openapi.json names those there are"),
        ({"num_iterations": 5.5}, "num_iterations", "got 5.5"),
        ([], "body", "got []"),
    ],
)
async def test_wrong_body_of_a_resume_is_not_taken_for_a_job(broker, world, body, field, message):
    job_id, _ = await world.started_job()
    answer = await broker.post(f"/v1/jobs/{job_id}:resume", json=body)
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["field"]) == (422, field)
    assert message in error["message"]
    assert "job" not in error["message"]


async def test_job_whose_data_has_gone_stays_as_it_is(broker, ledger, tmp_path):
    job_id = await submit(broker)
    await ledger.jobs.move(job_id, JobState.CANCELLED)
    (tmp_path / "prompts.jsonl").unlink()
    answer = await broker.post(f"/v1/jobs/{job_id}:resume")
    assert answer.status_code == 422
    assert "there is no file prompts.jsonl" in answer.text
    assert await ledger.jobs.state(job_id) is JobState.CANCELLED


async def test_job_with_answers_compared_by_other_rules_is_not_resumed(broker, ledger):
    for rules, reason in ((None, "compared without the rules 1 of this version"), (99, "here, not by rules 99")):
        job_id = await submit(broker)
        config = json.loads((await ledger.jobs.fields(job_id))["config"])
        assert config["reward"].pop("answer_rules") == 1
        config["reward"] |= {"answer_rules": rules} if rules else {}
        await ledger.jobs.move(job_id, JobState.FAILED, "the disk is full")
        await ledger.redis.hset(keys.JobKeys(job_id).job, "config", json.dumps(config))
        answer = await broker.post(f"/v1/jobs/{job_id}:resume")
        assert answer.status_code == 409
        assert reason in answer.json()["detail"]
        assert (await broker.get(f"/v1/jobs/{job_id}/audit")).json()["answer_rules"] == (rules or 0)


async def test_only_one_of_two_brings_a_job_back(ledger, world):
    job_id = await world.create_job()
    await ledger.jobs.move(job_id, JobState.FAILED, "no model")
    await ledger.jobs.resume(job_id, JobState.FAILED)
    with pytest.raises(CannotResume, match="is PENDING: it was FAILED a moment ago; look again"):
        await ledger.jobs.resume(job_id, JobState.FAILED)


async def test_outdated_look_at_a_resumed_job_is_put_right(ledger, world):
    job_id = await world.create_job()
    await ledger.jobs.move(job_id, JobState.FAILED, "no model")
    before = {job_id: await ledger.jobs.fields(job_id)}
    await ledger.jobs.resume(job_id, JobState.FAILED)
    await ledger.lists.file(before)  # a late broker does this
    await Retention(ledger, 0).step()
    assert await ledger.redis.zscore(keys.ended_jobs(JobState.FAILED), job_id) is None
    assert await ledger.redis.zscore(keys.WAITING_JOBS, job_id) is not None


async def test_time_in_between_is_no_time_of_an_iteration(ledger, world):
    job_id, _ = await world.started_job()
    job = keys.JobKeys(job_id).job
    now = await ledger.now()
    await ledger.redis.hset(job, mapping={"last_commit_at": now - 1000})
    for halt, go_on in ((JobState.PAUSED, JobState.RUNNING), (JobState.FAILED, None)):
        await ledger.redis.hset(job, "last_commit_at", now - 1000)
        await ledger.jobs.move(job_id, halt)
        await ledger.redis.hset(job, mapping={"halted_at": now - 900, "finished_at": now - 900})
        if go_on:
            await ledger.jobs.move(job_id, go_on)
        else:
            await ledger.jobs.resume(job_id, halt)
        last = float((await ledger.jobs.fields(job_id))["last_commit_at"])
        assert last == pytest.approx(await ledger.now() - 100, abs=5)


async def test_time_in_the_queue_is_the_jobs_and_no_iterations(ledger, world):
    job_id, epoch = await world.started_job()
    await ledger.iterations.open(job_id, 0, 0, tasks_for(0))
    job, now = keys.JobKeys(job_id).job, await ledger.now()
    assert float((await ledger.jobs.fields(job_id))["last_commit_at"]) == pytest.approx(now, abs=5)  # pauses move it on
    await ledger.redis.hset(job, mapping={"started_at": now - 1000, "last_commit_at": now - 1000})
    await ledger.jobs.move(job_id, JobState.FAILED, epoch=epoch)
    await ledger.redis.hset(job, "finished_at", now - 900)
    await ledger.jobs.resume(job_id, JobState.FAILED)
    assert "started_at" not in await ledger.jobs.fields(job_id)  # it waits
    for _ in range(2):
        await ledger.redis.hset(job, mapping={"queued_at": now - 25, "last_commit_at": now - 125})
        await ledger.jobs.move(job_id, JobState.CANCELLED)  # while it waits
        fields = await ledger.jobs.fields(job_id)
        assert float(fields["finished_at"]) - float(fields["started_at"]) == pytest.approx(100, abs=5)
        assert float(fields["last_commit_at"]) == pytest.approx(now - 100, abs=5)
        await ledger.jobs.resume(job_id, JobState.CANCELLED)
    await ledger.redis.hset(job, mapping={"queued_at": now - 50, "last_commit_at": now - 150})
    assert await ledger.trainer.claim_job(job_id, "trainer-b", 30.0)
    fields = await ledger.jobs.fields(job_id)
    assert float(fields["last_commit_at"]) == pytest.approx(now - 100, abs=5)
    assert float(fields["started_at"]) == pytest.approx(now - 100, abs=5)  # 100 s of work before


def test_number_of_iterations_only_grows():
    config = JobConfig.model_validate(job_body()).extended(5).extended(9)
    assert (config.schedule.earlier_ends, config.decay_ends) == ([3, 5], [3, 5, 9])
    with pytest.raises(ValueError, match=r"earlier_ends: \[3, 5\] must ascend and stay below the 5 iterations"):
        JobConfig.model_validate(config.model_dump() | {"schedule": {"num_iterations": 5, "earlier_ends": [3, 5]}})
