"""The claim loop beside a ledger whose answers come at chosen moments."""

import asyncio
from types import SimpleNamespace

from onbeat.streams.codec import PromptTask
from onbeat.streams.ledger import Claim
from services.rollout.claim_loop import Assignment, ClaimLoop, Ends
from services.rollout.inflight import Flight
from services.rollout.puller import Announcements
from tests.rollout_fakes import FakeEngine
from tests.waiting import until

ROLLOUT = SimpleNamespace(num_prompts_per_iteration=4, num_samples_per_prompt=2)


class FakePrompts:
    """A stream of prompts that other rollouts always claim first."""

    def __init__(self) -> None:
        self.num_prompts = self.num_claims = 0
        self.has_grown = asyncio.Event()
        self.comes_late = False  # the next claim looks just before a prompt comes

    async def claim(self, job_id: str, worker: str, count: int, lease_s: float) -> list[Claim]:
        self.num_claims += 1
        if self.comes_late:
            self.comes_late = False
            self.num_prompts += 1
            self.has_grown.set()
            await asyncio.sleep(0.01)
        return []

    async def wait_for_prompts(self, job_id: str, last_seen: str, timeout_s: float) -> str:
        if int(last_seen) == self.num_prompts:
            self.has_grown.clear()
            await asyncio.wait({asyncio.create_task(self.has_grown.wait())}, timeout=timeout_s)
        return str(self.num_prompts)


async def test_prompt_that_comes_during_a_claim_is_claimed_at_once(monkeypatch):
    monkeypatch.setattr("services.rollout.claim_loop.POLL_S", 5.0)
    prompts, ends = FakePrompts(), Ends()
    settings = SimpleNamespace(worker_id="worker", lease_s=30.0)
    job = Assignment(
        settings, SimpleNamespace(rollout=prompts), "job", SimpleNamespace(rollout=ROLLOUT, evaluation=None)
    )
    announcements = Announcements(None, None, lambda: None)
    loop = ClaimLoop(job, FakeEngine(), SimpleNamespace(num_playable=lambda: None), announcements, ends)
    flight, may_end = Flight(Claim("1-0", 1, PromptTask(group_id="group", num_samples=2))), asyncio.Event()
    flight.task = asyncio.create_task(may_end.wait())
    loop.flights["1-0"] = flight
    serving = asyncio.create_task(loop.serve())
    await until(lambda: prompts.num_claims and loop._arrival)  # it waits for prompts, and for the end of the group
    prompts.comes_late = True
    may_end.set()
    await until(lambda: not prompts.comes_late)
    num_claims = prompts.num_claims
    await until(lambda: prompts.num_claims > num_claims, deadline_s=2.0)
    ends.drain.set()
    await serving
