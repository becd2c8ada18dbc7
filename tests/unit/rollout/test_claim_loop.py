"""The claim loop beside a ledger whose answers come at chosen moments, and the ends of a session."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

from onbeat.contracts.errors import WeightsError
from onbeat.streams.codec import PromptTask
from onbeat.streams.ledger import Claim
from services.rollout.claim_loop import RETRY_DELAY_S, Assignment, ClaimLoop, Ends, Pause, is_groups_fault
from services.rollout.inflight import Flight
from services.rollout.puller import Announcements
from services.rollout.rewards.outcome import ServiceMissing
from services.rollout.session import RolloutSession
from tests.rollout_fakes import FakeEngine
from tests.waiting import until

ROLLOUT = SimpleNamespace(num_prompts_per_iteration=4, num_samples_per_prompt=2)


class FakePrompts:
    """A stream of prompts that other rollouts always claim first."""

    def __init__(self) -> None:
        self.num_prompts = self.num_claims = 0
        self.has_grown = asyncio.Event()
        self.released: list[str] = []  # as if they had never been claimed
        self.comes_late = False  # the next claim looks just before a prompt comes

    async def claim(self, job_id: str, worker: str, count: int, lease_s: float) -> list[Claim]:
        self.num_claims += 1
        if self.comes_late:
            self.comes_late = False
            self.num_prompts += 1
            self.has_grown.set()
            await asyncio.sleep(0.01)
        return []

    async def release(
        self, job_id: str, worker: str, entry_ids: list[str], *, is_attempt: bool, num_discarded_tokens: int
    ) -> None:
        assert not (is_attempt and entry_ids)
        self.released += entry_ids

    async def wait_for_prompts(self, job_id: str, last_seen: str, timeout_s: float) -> str:
        if int(last_seen) == self.num_prompts:
            self.has_grown.clear()
            await asyncio.wait({asyncio.create_task(self.has_grown.wait())}, timeout=timeout_s)
        return str(self.num_prompts)


def loop_beside(prompts: Any, ends: Ends) -> ClaimLoop:
    settings = SimpleNamespace(worker_id="worker", lease_s=30.0)
    config = SimpleNamespace(rollout=ROLLOUT, evaluation=None)
    job = Assignment(settings, SimpleNamespace(rollout=prompts), "job", config)
    producer = SimpleNamespace(num_playable=lambda: None)
    return ClaimLoop(job, FakeEngine(), producer, Announcements(None, None, lambda: None), ends)


def add_flight(loop: ClaimLoop, work: Coroutine[Any, Any, Any]) -> None:
    flight = Flight(Claim("1-0", 1, PromptTask(group_id="group", num_samples=2)))
    flight.task = asyncio.create_task(work)
    loop.flights["1-0"] = flight


async def test_prompt_that_comes_during_a_claim_is_claimed_at_once(monkeypatch):
    monkeypatch.setattr("services.rollout.claim_loop.POLL_S", 5.0)
    prompts, ends, may_end = FakePrompts(), Ends(), asyncio.Event()
    loop = loop_beside(prompts, ends)
    add_flight(loop, may_end.wait())
    serving = asyncio.create_task(loop.serve())
    await until(lambda: prompts.num_claims and loop._arrival)  # it waits for prompts, and for the end of the group
    prompts.comes_late = True
    may_end.set()
    await until(lambda: not prompts.comes_late)
    num_claims = prompts.num_claims
    await until(lambda: prompts.num_claims > num_claims, deadline_s=2.0)
    ends.drain.set()
    await serving


async def test_claim_during_which_the_drain_begins_is_the_last():
    prompts, ends = FakePrompts(), Ends()
    loop = loop_beside(prompts, ends)
    add_flight(loop, asyncio.sleep(60.0))

    async def claim(*_: Any) -> list[Claim]:
        prompts.num_claims += 1
        ends.drain.set()
        return [loop.flights["1-0"].claim] if prompts.num_claims < 3 else []

    prompts.claim = claim
    await loop.serve()
    await loop.abandon()
    assert prompts.num_claims == 1


async def test_engine_that_ignores_cancellation_is_left_behind(monkeypatch):
    monkeypatch.setattr("services.rollout.claim_loop.CANCEL_DEADLINE_S", 0.1, raising=False)
    prompts, may_end = FakePrompts(), asyncio.Event()
    loop = loop_beside(prompts, Ends())

    async def generate() -> None:
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()

    add_flight(loop, generate())
    await asyncio.sleep(0)  # it generates
    abandoning = asyncio.create_task(loop.abandon())
    await asyncio.wait({abandoning}, timeout=2.0)
    is_over = abandoning.done()
    may_end.set()
    await abandoning
    assert is_over
    assert prompts.released == ["1-0"]


async def test_group_whose_lease_is_lost_is_cancelled_once():
    num_renewals = num_cancelled = 0

    async def renew(*_: Any) -> list[str]:
        nonlocal num_renewals
        num_renewals += 1
        return []

    async def generate() -> None:
        nonlocal num_cancelled
        while True:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                num_cancelled += 1
                if is_over:
                    raise

    loop, is_over = loop_beside(SimpleNamespace(renew=renew), Ends()), False
    loop._job.settings.lease_s = 0.03
    add_flight(loop, generate())
    keeping = asyncio.create_task(loop.keep_leases())
    await until(lambda: num_renewals == 3)
    is_over = True
    keeping.cancel()
    loop.flights["1-0"].task.cancel()
    await asyncio.wait({loop.flights["1-0"].task})
    assert num_cancelled == 2  # one of them is this test's


def test_nothing_is_claimed_until_a_missing_version_is_announced(monkeypatch):
    """A trainer that has started again replays what it lacks: it announces older versions first."""
    announcements = Announcements(None, None, lambda: None)
    pause, later = Pause(announcements), time.monotonic() + RETRY_DELAY_S
    pause.begin(WeightsError("version 3 is not held"), 3)
    monkeypatch.setattr("services.rollout.claim_loop.time.monotonic", lambda: later + 1.0)
    for newest in (None, 0, 2):
        announcements.newest = newest
        assert pause.is_on()
    announcements.newest = 4
    assert not pause.is_on()


async def test_missing_service_is_an_attempt_in_evaluations_only():
    """Groups that are handed back come first: those of an evaluation would hold training up for ever."""
    for is_evaluation in (False, True):
        flight = Flight(Claim("1-0", 1, PromptTask(group_id="group", is_evaluation=is_evaluation)))
        flight.task = asyncio.get_running_loop().create_future()
        flight.task.set_exception(ServiceMissing("service", "no judge"))
        assert is_groups_fault(flight) is is_evaluation


def test_first_stop_during_a_job_change_hurries_nobody():
    session = RolloutSession(Assignment(None, None, "job", None), None)
    for act, is_hurried in ((session.leave, False), (session.stop, False), (session.stop, True)):
        act()
        assert (session._ends.drain.is_set(), session._ends.abandon.is_set()) == (True, is_hurried)
