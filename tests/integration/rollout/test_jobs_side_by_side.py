"""Several jobs at once: trainers and rollouts share a pool, users steer from all sides, rollouts come and go."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from onbeat.contracts.states import JobState
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.rollout import puller
from services.rollout import worker as rollout_worker
from tests.broker_fixtures import submit
from tests.integration.rollout.rollout_rig import G, Rig
from tests.rollout_fakes import FakeEngine

PATIENCE_S = 60.0


def new_pool() -> str:
    return f"p{uuid.uuid4().hex[:8]}"


async def test_pending_job_shows_its_place_in_the_queue_of_its_pool(broker, ledger):
    pool, other = new_pool(), new_pool()
    first, elsewhere = await submit(broker, pool=pool), await submit(broker, pool=other)
    second, third = await submit(broker, pool=pool), await submit(broker, pool=pool)

    async def places() -> list[int | None]:
        listed = {job["id"]: job["queue_position"] for job in (await broker.get("/v1/jobs")).json()["jobs"]}
        one_by_one = [(await broker.get(f"/v1/jobs/{job_id}")).json()["queue_position"] for job_id in job_ids]
        assert one_by_one == [listed[job_id] for job_id in job_ids]
        return one_by_one

    job_ids = [first, second, third, elsewhere]
    assert await places() == [1, 2, 3, 1]
    await ledger.trainer.claim_job(first, "trainer-a", 30)
    assert await places() == [None, 1, 2, 1]
    await broker.post(f"/v1/jobs/{second}:cancel")
    assert await places() == [None, None, 1, 1]


# ---- users -----------------------------------------------------------------------------------------------------------

# state before -> (pause, resume, cancel): the state after, or None for a refusal that changes nothing.
MOVES = {
    "PENDING": (None, None, "CANCELLED"),
    "RUNNING": ("PAUSED", "RUNNING", "CANCELLING"),
    "PAUSED": ("PAUSED", "RUNNING", "CANCELLING"),
    "CANCELLING": (None, None, "CANCELLING"),
    "CANCELLED": (None, "PENDING", "CANCELLED"),
    "SUCCEEDED": (None, None, None),
    "FAILED": (None, "PENDING", None),
}


async def bring_to(ledger: Ledger, job_id: str, state: str) -> None:
    if state not in ("PENDING", "FAILED"):
        await ledger.trainer.claim_job(job_id, "trainer-a", 300)  # the lease keeps others from ending a CANCELLING job
    if state == "CANCELLED":
        await ledger.jobs.move(job_id, JobState.CANCELLING)
    if state not in ("PENDING", "RUNNING"):
        await ledger.jobs.move(job_id, JobState(state))


@pytest.mark.parametrize("before", list(MOVES))
async def test_every_verb_in_every_state_and_once_more(broker, ledger, before):
    for verb, after in zip(("pause", "resume", "cancel"), MOVES[before], strict=True):
        job_id = await submit(broker, pool=new_pool())
        await bring_to(ledger, job_id, before)
        for _ in range(2):
            answer = await broker.post(f"/v1/jobs/{job_id}:{verb}")
            if after is None:
                assert answer.status_code == 409
                assert f"job {job_id} is {before}" in answer.json()["detail"]
            else:
                assert (answer.status_code, answer.json()["state"]) == (200, after), verb
            assert await ledger.jobs.state(job_id) == (after or before)


async def test_cancel_wins_over_whatever_is_asked_at_the_same_time(broker, ledger):
    """But a resume that comes when a pending job is already CANCELLED brings it back: it is asked of none here."""
    for has_begun in (True, False) * 3:
        job_id = await submit(broker, pool=new_pool())
        claiming = asyncio.create_task(ledger.trainer.claim_job(job_id, "trainer-a", 300))  # a trainer comes just now
        if has_begun:
            await claiming
        verbs = ["pause", "resume" if has_begun else "pause", "cancel"] * 5
        answers = await asyncio.gather(*(broker.post(f"/v1/jobs/{job_id}:{verb}") for verb in verbs))
        assert {answer.status_code for answer in answers} <= {200, 409}
        assert {answer.status_code for answer in answers[2::3]} == {200}
        has_trainer = await claiming is not None
        assert await ledger.jobs.state(job_id) is (JobState.CANCELLING if has_trainer else JobState.CANCELLED)


# ---- rollouts --------------------------------------------------------------------------------------------------------


class Pool:
    """Jobs with a fake trainer each, and rollouts that can reach all of them."""

    def __init__(self, ledger: Ledger, num_jobs: int) -> None:
        pool = new_pool()
        self.rigs = [Rig(ledger, pool, address=f"trainer:{index}") for index in range(num_jobs)]
        for rig in self.rigs:
            rig.connect = self.connect
        self.crew = self.rigs[0]  # where all rollouts are started

    def connect(self, address: str, job_id: str):
        return next(rig for rig in self.rigs if rig.trainer.address == address).trainer.connect(address)

    async def counts(self) -> list[int]:
        """Rollouts of each job."""
        of_job = Counter(worker.job_id for worker in await self.crew.ledger.workers.records(self.crew.pool))
        return [of_job[rig.job_id] for rig in self.rigs]

    async def until_counts(self, *wanted: int) -> None:
        await self.crew.until(self.counts, list(wanted), PATIENCE_S)


@pytest_asyncio.fixture
async def pool(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pool]:
    monkeypatch.setattr(rollout_worker, "MOVE_CHECK_S", 0.3)
    pool = Pool(ledger, num_jobs=3)
    yield pool
    await pool.crew.stop()


async def test_rollouts_spread_over_jobs_and_move_to_one_without_any(pool):
    first, second, third = pool.rigs
    await first.start_job()
    await second.start_job()
    for _ in range(4):
        pool.crew.start_worker()
    await pool.until_counts(2, 2, 0)
    await first.open(0, *(first.task(0, index) for index in range(6)))
    await second.open(0, *(second.task(0, index) for index in range(6)))
    await first.drained(0, PATIENCE_S)
    await second.drained(0, PATIENCE_S)

    await third.start_job()
    await third.open(0, third.task(0, 0))
    await third.drained(0, PATIENCE_S)

    async def has_moved() -> bool:
        return sorted(await pool.counts()) == [1, 1, 2]

    await pool.crew.until(has_moved, timeout_s=PATIENCE_S)  # a heartbeat may be later than the work
    counts = await pool.counts()
    for rig in pool.rigs:
        assert (
            (await rig.iteration(0)).get("num_lost", "0") == (await rig.iteration(0)).get("num_duplicate", "0") == "0"
        )
    await asyncio.sleep(1.0)  # three looks
    assert await pool.counts() == counts  # and they stay

    await first.ledger.jobs.move(first.job_id, JobState.SUCCEEDED)
    gone = counts[0]
    assert gone > 0

    async def have_found_work() -> bool:
        now = await pool.counts()
        return now[0] == 0 and sum(now) == 4

    await pool.crew.until(have_found_work, timeout_s=PATIENCE_S)


async def test_rollout_leaves_a_deleted_job_and_recreates_nothing(pool, monkeypatch):
    monkeypatch.setattr(puller, "ADDRESS_CHECK_S", 0.05)  # the weights are looked at before the job's state
    first, second, _ = pool.rigs
    await first.start_job()
    engine = FakeEngine()
    engine.may_finish.clear()
    pool.crew.start_worker(engine)
    await first.open(0, *(first.task(0, index) for index in range(3)))
    await first.until(lambda: engine.num_in_flight, 3 * G, PATIENCE_S)
    await first.ledger.jobs.move(first.job_id, JobState.FAILED, "over")
    await first.ledger.jobs.delete(first.job_id)
    await second.start_job()
    await pool.until_counts(0, 1, 0)
    left = [key async for key in first.ledger.redis.scan_iter(f"onbeat:{{{first.job_id}}}:*", count=10_000)]
    assert left == [JobKeys(first.job_id).deleted.encode()]


async def test_rollouts_join_and_leave_without_lost_or_repeated_groups(pool):
    rig, num_groups = pool.crew, 40
    await rig.start_job(num_prompts=num_groups, max_group_attempts=1)
    engines = [FakeEngine(capacity=2 * G, delay_s=0.05) for _ in range(3)]
    rig.start_worker(engines[0])
    await rig.open(0, *(rig.task(0, index) for index in range(num_groups)))

    async def accepted(count: int) -> None:
        async def are_in() -> bool:
            return int((await rig.iteration(0))["num_accepted"]) >= count

        await rig.until(are_in, timeout_s=PATIENCE_S)

    await accepted(4)
    engines[0].may_finish.clear()  # or it might have finished before the others are there
    for engine in engines[1:]:
        engine.may_finish.clear()
        rig.start_worker(engine)
    await rig.until(lambda: all(engine.num_in_flight for engine in engines), timeout_s=PATIENCE_S)
    for engine in engines:
        engine.may_finish.set()
    await accepted(12)
    for worker, _ in rig.running[:2]:
        worker.stop()
    await asyncio.wait({task for _, task in rig.running[:2]}, timeout=PATIENCE_S)
    groups = await rig.drained(0, PATIENCE_S)
    assert [group.group_id for group in groups] == sorted(f"0-{index}" for index in range(num_groups))
    assert {group.worker_id for group in groups} == {"w0", "w1", "w2"}
    assert not any(group.HasField("failure") for group in groups)
    fields = await rig.iteration(0)
    assert [fields.get(name, "0") for name in ("num_duplicate", "num_stale", "num_lost")] == ["0", "0", "0"]
