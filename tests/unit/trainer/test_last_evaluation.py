"""The end of a job, which waits for the evaluation of the last version."""

import threading
import time
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from onbeat.types import EvaluationState, JobState
from services.trainer.job import session
from services.trainer.job.background import Background
from services.trainer.job.lease import ClaimedJob, Lease
from services.trainer.job.session import JobSession

DEADLINE_S = 1.0


class Clock:
    """A clock that only sleep moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.RUNNING])
def test_time_of_a_pause_does_not_count(state, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(session, "time", clock)

    async def state_of(job_id, evaluation):
        return EvaluationState.DONE if clock.now_s > 3 * DEADLINE_S else EvaluationState.OPEN

    events = AsyncMock()
    trainer = SimpleNamespace(renew_job=AsyncMock(return_value=state), give_back=AsyncMock())
    ledger = SimpleNamespace(trainer=trainer, evaluations=SimpleNamespace(state=state_of), event_log=events)
    schedule = SimpleNamespace(num_iterations=3, iteration_deadline_s=DEADLINE_S)
    config = SimpleNamespace(max_staleness=0, evaluation=True, schedule=schedule, training=SimpleNamespace())
    job = JobSession(Lease(Background(), ledger, ClaimedJob("j", "1", config, 30.0), threading.Event()))
    try:
        while job.check() is not state:
            time.sleep(0.01)
        job.wait_for_evaluation()
        assert (clock.now_s > 3 * DEADLINE_S) == (state is JobState.PAUSED)
        assert events.emit.await_count == (state is JobState.RUNNING)
    finally:
        job.close()
