"""Jobs that are over go on, with a real trainer: to the bits of an undisturbed pass, by a learning rate that fits."""

import pytest

from onbeat.types import JobState
from tests.chaos.exactly_once import check_exactly_once
from tests.e2e.stack import RunningStack, running, tiny_job, wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


@pytest.fixture(scope="module")
def stack(folder):
    with running(folder) as stack:
        yield stack


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
