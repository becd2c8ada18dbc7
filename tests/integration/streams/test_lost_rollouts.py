"""Rollouts that die or fall silent with groups, as on spot machines: the groups pay nothing for it, and it is told."""

import asyncio

from onbeat.contracts.states import IterationState, Verdict
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Claim, Ledger
from tests.world import World, make_group

SHORT_S = 0.01  # a lease that has run out at the next claim


async def claim_after(ledger: Ledger, job_id: str, worker: str, count: int = 100) -> list[Claim]:
    """Claim after the short leases of others have run out."""
    await asyncio.sleep(3 * SHORT_S)
    return await ledger.rollout.claim(job_id, worker, count, SHORT_S)


async def test_deaths_cost_a_group_no_attempt(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=1)
    claims = [claim for name in ("a", "b", "a", "c") for claim in await claim_after(ledger, job_id, name)]
    assert [claim.attempt for claim in claims] == [1, 1, 1, 1]
    assert claims[-1].lost_rollouts == ("a", "b", "a")


async def test_attempts_before_a_death_still_count(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=1)
    (claim,) = await world.claim_all(job_id, "w1")
    await ledger.rollout.release(job_id, "w1", [claim.entry_id], is_attempt=True)
    (claim,) = await claim_after(ledger, job_id, "dying")
    (claim,) = await claim_after(ledger, job_id, "w2")
    assert (claim.attempt, claim.lost_rollouts) == (2, ("dying",))
    await ledger.rollout.release(job_id, "w2", [claim.entry_id])
    (claim,) = await world.claim_all(job_id, "w3")
    assert (claim.attempt, claim.lost_rollouts) == (2, ("dying",))  # handed back in good order: nobody was lost


async def test_one_event_names_a_lost_rollout_and_its_groups(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=3)
    await ledger.rollout.claim(job_id, "dying", 2, SHORT_S)
    for worker in ("first", "second"):  # one takes over one group, and another one the next
        assert len(await claim_after(ledger, job_id, worker, count=1)) == 1
    lost = [event for event in await ledger.event_log.read(job_id) if event.kind == "worker.lost"]
    (event,) = [event for event in lost if event.data["worker_id"] == "dying"]
    assert event.message == "dying died or fell silent with 2 groups, generated again: 0-0, 0-1"
    assert event.data["group_ids"] == ["0-0", "0-1"]


async def test_accepted_group_leaves_no_trace_of_lost_rollouts(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=1)
    await claim_after(ledger, job_id, "dying")
    (claim,) = await claim_after(ledger, job_id, "w2")
    assert await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task, "w2")) is Verdict.ACCEPTED
    assert await ledger.iterations.state(job_id, 0) is IterationState.DRAINED
    assert not await ledger.redis.exists(JobKeys(job_id).lost_rollouts)
