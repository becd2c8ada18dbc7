"""The end of a job whose model no engine loads: once every living rollout of the pool that tried it has failed."""

import pytest

from onbeat.contracts.records import EngineFailure, WorkerRecord
from services.broker.deadlines import RECENT_S
from services.broker.engine_failures import why_not_loaded

NOW = 100_000.0
FAILED = {"job": EngineFailure(epoch="1", cause="ImportError: no torchvision")}
REASON = "the engine cannot load the model: ImportError: no torchvision (on w0)"


def worker(name: str, state: str = "idle", silent_s: float = 0.0, **fields: object) -> WorkerRecord:
    return WorkerRecord.model_validate({"id": name, "state": state, "last_seen_at": NOW - silent_s, **fields})


FAILING = worker("w0", "unsuited", unsuited_for=["job"], engine_failures=FAILED)


def reason_with(*others: WorkerRecord, epoch: str = "1") -> str:
    return why_not_loaded("job", epoch, [FAILING, *others], NOW)


@pytest.mark.parametrize(
    "others",
    [
        [],
        [worker("w1", "generating", job_id="other")],  # it has not tried, and may serve that job for days
        [worker("w1", "unsuited", unsuited_for=["job"])],  # it cannot compute in the job's dtype
        [worker("w1", silent_s=60.0)],  # it is dead, and served nothing
        [worker("w1", "generating", silent_s=RECENT_S + 1, job_id="job")],  # it has been dead for long
    ],
)
def test_job_fails_when_all_that_tried_have_failed(others: list[WorkerRecord]) -> None:
    assert reason_with(*others) == REASON


@pytest.mark.parametrize(
    "other",
    [
        worker("w1", "starting", job_id="job"),
        worker("w1", "generating", job_id="job"),
        worker("w1", "generating", silent_s=60.0, job_id="job"),  # a spot machine, which may come back
        worker("w1"),  # it is about to try
        worker("w1", "starting"),  # the process starts
    ],
)
def test_job_waits_for_a_rollout_that_may_load_the_model(other: WorkerRecord) -> None:
    assert reason_with(other) == ""


def test_failure_before_a_resume_does_not_count() -> None:
    assert reason_with(epoch="2") == ""


def test_failure_of_a_dead_rollout_does_not_count() -> None:
    dead = FAILING.model_copy(update={"last_seen_at": NOW - 60})
    assert why_not_loaded("job", "1", [dead], NOW) == ""


def test_failure_of_the_files_waits_for_nobody() -> None:
    broken = {"job": EngineFailure(epoch="1", cause="BadWeightFile: no header", is_of_files=True)}
    workers = [worker("w0", engine_failures=broken), worker("w1", "starting", job_id="job")]
    assert why_not_loaded("job", "1", workers, NOW) == (
        "the engine cannot load the model: BadWeightFile: no header (on w0)"
    )


def test_each_cause_is_named_with_its_rollouts() -> None:
    other = {"job": EngineFailure(epoch="1", cause="OutOfMemoryError: 80 GB")}
    assert reason_with(worker("w1", engine_failures=other), worker("w2", engine_failures=FAILED)) == (
        "the engine cannot load the model: ImportError: no torchvision (on w0, w2); OutOfMemoryError: 80 GB (on w1)"
    )
