"""Jobs that are over go on, and others from their checkpoints, with a real trainer and the bits of one whole pass."""

import uuid

import pytest

from onbeat.contracts.errors import ApiError
from onbeat.contracts.states import JobState
from onbeat.streams.keys import JobKeys
from tests.chaos.exactly_once import check_exactly_once
from tests.e2e.stack import RunningStack, replay, tiny_job
from tests.waiting import wait_until


def learning_rates(stack: RunningStack, job_id: str) -> list[float]:
    return [value for _, value in stack.client.jobs.metrics(job_id)["train/learning_rate"]]


@pytest.mark.timeout(300)
def test_more_iterations_follow_a_longer_decay(stack, folder, tmp_path):
    optimizer = {"learning_rate": 1e-3, "decay": "linear"}
    job_id = stack.client.jobs.create(tiny_job(folder, schedule={"num_iterations": 2}, optimizer=optimizer)).id
    assert stack.wait(job_id).state is JobState.SUCCEEDED
    assert stack.client.jobs.resume(job_id, num_iterations=4).state is JobState.PENDING
    check_exactly_once(stack, job_id, tmp_path)
    assert learning_rates(stack, job_id) == pytest.approx([1e-3, 5e-4, 5e-4, 2.5e-4])


@pytest.mark.timeout(300)
def test_cancelled_job_repeats_what_no_checkpoint_has(stack, folder, tmp_path):
    job_id = stack.client.jobs.create(tiny_job(folder)).id
    wait_until(lambda: stack.job(job_id).next_iteration >= 1, "an iteration is committed")
    stack.client.jobs.cancel(job_id)
    assert stack.wait(job_id).state is JobState.CANCELLED
    assert stack.job(job_id).checkpoint is None
    stack.client.jobs.resume(job_id)
    check_exactly_once(stack, job_id, tmp_path)


@pytest.mark.timeout(300)
def test_fork_trains_on_from_a_checkpoint_that_is_there(stack, folder):
    other = ["optimizer.learning_rate=0.1", "schedule.num_iterations=4", "checkpoint.every_iterations=9"]
    shape = {"schedule": {"num_iterations": 3}, "checkpoint": {"every_iterations": 1}}
    parent = stack.client.jobs.create(tiny_job(folder, **shape)).id
    assert stack.wait(parent).state is JobState.SUCCEEDED
    with pytest.raises(ApiError, match="no checkpoint after 1 iterations; there are those after 2, 3"):
        stack.client.jobs.fork(parent, 1)
    faster = stack.client.jobs.fork(parent, 2, other).id
    same = stack.client.jobs.fork(parent, 2).id
    for job_id, num_iterations in ((faster, 4), (same, 3)):
        job = stack.wait(job_id)
        assert job.state is JobState.SUCCEEDED, job.error
        assert [record.iteration for record in stack.client.jobs.iterations(job_id)] == list(range(2, num_iterations))
        assert stack.client.jobs.audit(job_id).is_clean
    assert learning_rates(stack, faster) == pytest.approx([0.1, 0.1])
    prompts = [{sample.prompt for sample in stack.client.jobs.samples(job, 2, limit=99)} for job in (parent, same)]
    assert prompts[0] == prompts[1]
    report = replay(stack, faster, 3)
    assert (report["bits_agree"], report["replayed_from"]) == (True, 2)
    (stack.data_dir / "jobs" / parent / "checkpoints").rename(folder / "elsewhere")
    orphan = stack.wait(stack.client.jobs.fork(parent, 2).id)
    assert orphan.state is JobState.FAILED
    assert f"there is no iteration-000002 of job {parent} in" in orphan.error
    assert "which has: none; fork from one of these" in orphan.error


@pytest.mark.timeout(300)
def test_checkpoint_of_a_deleted_job_is_not_taken_for_a_new_one(stack, folder):
    shape = {"schedule": {"num_iterations": 1}, "checkpoint": {"every_iterations": 1}}
    job, key = tiny_job(folder, **shape), uuid.uuid4().hex
    job_id = stack.client.jobs.create(job, idempotency_key=key).id
    assert stack.wait(job_id).state is JobState.SUCCEEDED
    stack.client.jobs.delete(job_id)
    stack.redis.delete(JobKeys(job_id).deleted)  # as after a day
    assert stack.client.jobs.create(job, idempotency_key=key).id == job_id
    again = stack.wait(job_id)
    assert again.state is JobState.FAILED
    assert "has a checkpoint after 1 iterations, but this job has committed 0" in again.error
