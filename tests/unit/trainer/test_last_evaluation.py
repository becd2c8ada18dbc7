"""The end of a job, which waits for the evaluation of the last version."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from onbeat.contracts.states import EvaluationState, JobState
from onbeat.process.loop_thread import LoopThread
from services.trainer.job import session
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


@contextmanager
def at_its_end(monkeypatch, state, is_last_done, open_ones):
    """Build a job in that state, its clock and its events.

    `is_last_done` and `open_ones`, the open evaluations, are functions of the clock's time.
    """
    clock, events = Clock(), AsyncMock()
    monkeypatch.setattr(session, "time", clock)

    async def state_of(job_id, evaluation):
        return EvaluationState.DONE if is_last_done(clock.now_s) else EvaluationState.OPEN

    async def find_open(job_id):
        return open_ones(clock.now_s)

    trainer = SimpleNamespace(renew_job=AsyncMock(return_value=state), give_back=AsyncMock())
    fields = AsyncMock(return_value={"scores": '{"pass_at_k": 0.5}'})
    evaluations = SimpleNamespace(state=state_of, open_ones=find_open, fields=fields)
    ledger = SimpleNamespace(trainer=trainer, evaluations=evaluations, event_log=events)
    schedule = SimpleNamespace(num_iterations=3, iteration_deadline_s=DEADLINE_S)
    config = SimpleNamespace(max_staleness=0, evaluation=True, schedule=schedule, training=SimpleNamespace())
    job = JobSession(Lease(LoopThread("trainer"), ledger, ClaimedJob("j", "1", config, 30.0), threading.Event()))
    try:
        while job.check() is not state:
            time.sleep(0.01)
        yield job, clock, events
    finally:
        job.close()


@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.RUNNING])
def test_time_of_a_pause_does_not_count(state, monkeypatch):
    ends_late = at_its_end(monkeypatch, state, lambda now_s: now_s > 3 * DEADLINE_S, lambda now_s: [])
    with ends_late as (job, clock, events):
        job.wait_for_evaluation(3)
        assert (clock.now_s > 3 * DEADLINE_S) == (state is JobState.PAUSED)
        assert events.emit.await_count == (state is JobState.RUNNING)


def test_an_earlier_evaluation_opened_late_is_waited_for(monkeypatch):
    def open_ones(now_s):
        return [0] if now_s < DEADLINE_S / 2 else []

    with at_its_end(monkeypatch, JobState.RUNNING, lambda now_s: True, open_ones) as (job, clock, events):
        job.wait_for_evaluation(3)
        assert clock.now_s == pytest.approx(DEADLINE_S / 2)
        assert events.emit.await_count == 0


@pytest.mark.parametrize(("is_done", "scores", "num_events"), [(True, {"pass_at_k": 0.5}, 0), (False, {}, 1)])
def test_training_goes_on_without_an_evaluation_in_its_middle(monkeypatch, is_done, scores, num_events):
    with at_its_end(monkeypatch, JobState.RUNNING, lambda now_s: is_done, lambda now_s: []) as (job, _, events):
        assert job.wait_for_evaluation(1) == scores
        assert events.emit.await_count == num_events
        assert all("evaluation 1 did not end" in call.args[2] for call in events.emit.await_args_list)
