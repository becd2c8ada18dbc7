"""The rules that the scripts enforce, on a real Redis, one by one.

What holds in any order of calls (fences, leases, once) is checked in tests/model, submissions that lie in tests/fuzz.
"""

import asyncio
import json
import secrets
import time

import pytest
from redis.exceptions import DataError
from redis.exceptions import TimeoutError as RedisTimeout

from onbeat.contracts.deadlines import SILENT_S
from onbeat.contracts.errors import JobFailed, LeaseLost
from onbeat.contracts.records import PublishedWeights, WeightsRecord, WeightUpdate, WorkerRecord
from onbeat.contracts.states import IterationState, JobState, Verdict
from onbeat.streams.connection import connect
from onbeat.streams.keys import TRAINER_GROUP, JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.batching import BatchedScript
from onbeat.streams.ledger.scripts import group_states
from onbeat.streams.records import read_iterations
from tests.world import World, failed_group, make_group, tasks_for

# ---- the trainer's lease -----------------------------------------------------------------------------------------


async def test_handed_back_lease_is_free_at_once_unless_job_is_paused(ledger: Ledger, world: World) -> None:
    job_id, epoch = await world.started_job()
    assert await ledger.trainer.claim_job(job_id, "trainer-b", 30) is None
    await ledger.trainer.renew_job(job_id, epoch, 0.0)
    await ledger.jobs.move(job_id, JobState.PAUSED)
    assert await ledger.trainer.claim_job(job_id, "trainer-b", 30) is None
    await ledger.jobs.move(job_id, JobState.RUNNING)
    assert await ledger.trainer.claim_job(job_id, "trainer-b", 30) == "2"


# ---- iterations --------------------------------------------------------------------------------------------------


async def test_iteration_opens_in_turn_on_published_weights_in_bound(ledger: Ledger, world: World) -> None:
    job_id = await world.create_job(schedule={"mode": "bounded", "max_staleness": 2})
    assert "PENDING" in await ledger.iterations.open(job_id, 0, 0, tasks_for(0))
    epoch = await ledger.trainer.claim_job(job_id, "trainer-a", 30)
    assert epoch
    assert await ledger.iterations.open(job_id, 0, 0, tasks_for(0)) == "published version is none"
    await ledger.versions.announce(job_id, epoch, 0, "127.0.0.1:1", "d0")
    assert await ledger.iterations.open(job_id, 1, 0, tasks_for(1)) == "next to open is 0"
    for iteration in (0, 1, 2):
        assert await ledger.iterations.open(job_id, iteration, 0, tasks_for(iteration)) == ""
        assert [task.policy_version for task in await world.drain(job_id)] == [0, 0]
    assert await ledger.iterations.open(job_id, 3, 0, tasks_for(3)) == "needs version 1 or newer"
    assert await ledger.iterations.open(job_id, 3, 1, tasks_for(3)) == "published version is 0"
    await world.commit(job_id, epoch, 0)
    assert await ledger.iterations.open(job_id, 2, 1, tasks_for(2)) == "next to open is 3"
    assert await ledger.iterations.open(job_id, 3, 0, tasks_for(3)) == "published version is 1"
    assert await ledger.iterations.open(job_id, 3, 1, tasks_for(3)) == ""
    assert {task.policy_version for task in await world.drain(job_id)} == {1}
    assert [await ledger.iterations.policy_version(job_id, t) for t in range(5)] == [0, 0, 0, 1, None]


async def test_paused_job_takes_what_is_in_flight_and_begins_nothing(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job()
    (first,) = await world.claim_all(job_id, count=1)
    await ledger.jobs.move(job_id, JobState.PAUSED)
    assert await world.claim_all(job_id) == []
    assert "PAUSED" in await ledger.iterations.open(job_id, 0, 0, tasks_for(0))
    assert await ledger.rollout.submit(job_id, first.entry_id, make_group(first.task)) is Verdict.ACCEPTED
    await ledger.jobs.move(job_id, JobState.RUNNING)
    assert len(await world.claim_all(job_id)) == 1


async def test_job_that_is_over_commits_nothing(ledger: Ledger, world: World) -> None:
    job_id, epoch = await world.open_job()
    await world.drain(job_id)
    await ledger.jobs.move(job_id, JobState.FAILED)
    with pytest.raises(LeaseLost):
        await world.commit(job_id, epoch, 0)


# ---- bounded staleness -------------------------------------------------------------------------------------------


async def start_bounded(ledger: Ledger, max_staleness: int) -> tuple[str, str]:
    """Start a job with that bound and no open iteration; return (job id, epoch)."""
    return await World(ledger).started_job(schedule={"mode": "bounded", "max_staleness": max_staleness})


async def test_unclaimed_prompts_hold_the_next_opening_back(ledger: Ledger, world: World) -> None:
    job_id, _ = await start_bounded(ledger, max_staleness=2)
    await ledger.iterations.open(job_id, 0, 0, tasks_for(0, 3))
    await world.claim_all(job_id, "w1", count=2)
    assert await ledger.iterations.open(job_id, 1, 0, tasks_for(1)) == "prompts are still unclaimed"
    assert "prompts.claimed" not in [event.kind for event in await ledger.event_log.read(job_id)]
    await world.claim_all(job_id, "w2")
    assert [event.kind for event in await ledger.event_log.read(job_id)].count("prompts.claimed") == 1
    assert await ledger.iterations.open(job_id, 1, 0, tasks_for(1)) == ""
    assert await ledger.iterations.state(job_id, 0) is IterationState.OPEN  # claimed, not done


async def test_freshest_version_is_not_waited_for(ledger: Ledger, world: World) -> None:
    job_id, epoch = await start_bounded(ledger, max_staleness=1)
    await world.run_iteration(job_id, epoch, 0)
    await ledger.redis.xadd(JobKeys(job_id).prompts, {"task": b""})  # some other work nobody has claimed
    assert await ledger.iterations.open(job_id, 1, 1, tasks_for(1)) == ""


async def test_unpublished_commit_leaves_rollouts_on_their_version(ledger: Ledger, world: World) -> None:
    job_id, epoch = await start_bounded(ledger, max_staleness=2)
    for iteration in (0, 1):
        assert await ledger.iterations.open(job_id, iteration, 0, tasks_for(iteration)) == ""
        await world.drain(job_id)
        assert await world.commit(job_id, epoch, iteration, is_published=False)
    fields = await ledger.jobs.fields(job_id)
    assert (fields["next_iteration"], fields["policy_version"], fields["weights_digest"]) == ("2", "0", "d0")
    assert (await ledger.iterations.fields(job_id, 1))["weights_digest"] == "d2"
    assert not await world.commit(job_id, epoch, 1, is_published=False)  # replayed: the same bits
    with pytest.raises(JobFailed, match="gave other bits"):
        await ledger.trainer.commit(job_id, epoch, 1, 2, "other", {}, "", is_published=False)
    await ledger.versions.announce(job_id, epoch, 2, "127.0.0.1:2", "d2")  # a trainer that starts again there
    fields = await ledger.jobs.fields(job_id)
    assert (fields["policy_version"], fields["weights_address"]) == ("0", "127.0.0.1:2")
    assert await ledger.iterations.open(job_id, 2, 0, tasks_for(2)) == ""
    await world.drain(job_id)
    with pytest.raises(AssertionError, match="version 3 must be published"):  # else iteration 3 could never be opened
        await world.commit(job_id, epoch, 2, is_published=False)
    assert await world.commit(job_id, epoch, 2)
    assert (await ledger.jobs.fields(job_id))["policy_version"] == "3"


# ---- numbers of weight updates -----------------------------------------------------------------------------------


async def test_version_keeps_first_numbers_and_each_time_is_an_event(ledger: Ledger, world: World) -> None:
    def update_of(received_bytes: int, open_s: float | None = None) -> WeightUpdate:
        numbers = {"pull_s": 0.25, "apply_s": 0.125, "load_s": 0.5, "open_s": open_s, "num_faults": 1}
        return WeightUpdate(received_bytes=received_bytes, sources=["h:1", "h:2"], **numbers)

    job_id, epoch = await world.started_job()
    assert await ledger.versions.weights(job_id, 0) is None  # announced without numbers, served by nobody
    await ledger.versions.engine_ready(job_id, 1, "w:1", update_of(20, 1.5))  # may be faster than the announcement
    rollouts = {"w:1": update_of(20, 1.5)}
    assert await ledger.versions.weights(job_id, 1) == WeightsRecord(policy_version=1, rollouts=rollouts)
    numbers = {"full_bytes": 1000, "delta_bytes": 20, "encode_s": 0.5, "publish_s": 0.75}
    await ledger.versions.announce(job_id, epoch, 1, "127.0.0.1:1", "d1", PublishedWeights(**numbers))
    await ledger.versions.engine_ready(job_id, 1, "published", update_of(1000))  # a worker may have any name
    again = PublishedWeights(**numbers | {"delta_bytes": None})  # after a restart
    await ledger.versions.announce(job_id, epoch, 1, "127.0.0.1:1", "d1", again)
    await ledger.versions.engine_ready(job_id, 1, "w:1", update_of(1000))
    rollouts["published"] = update_of(1000)
    expected = WeightsRecord(policy_version=1, rollouts=rollouts, **numbers)
    assert await ledger.versions.weights(job_id, 1) == expected
    updates = [event for event in await ledger.event_log.read(job_id) if event.kind == "worker.updated"]
    assert [event.message for event in updates] == [
        f"{worker} serves policy version 1" for worker in ("w:1", "published", "w:1")
    ]
    times = {"pull_s": 0.25, "apply_s": 0.125, "load_s": 0.5, "open_s": 1.5}
    assert updates[0].data == {"policy_version": 1, "worker_id": "w:1", "num_bytes": 20} | times
    assert (updates[2].data["num_bytes"], updates[2].data.get("open_s")) == (1000, None)


# ---- groups ------------------------------------------------------------------------------------------------------


async def test_one_token_of_another_version_makes_a_group_stale(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=1)
    (claim,) = await world.claim_all(job_id, "w1")
    group = make_group(claim.task)
    del group.responses[1].version_spans[:]
    group.responses[1].version_spans.add(policy_version=0, start=0, end=1)
    group.responses[1].version_spans.add(policy_version=1, start=1, end=2)
    assert await ledger.rollout.submit(job_id, claim.entry_id, group) is Verdict.STALE
    assert (await ledger.iterations.fields(job_id, 0))["num_stale"] == "1"
    assert await ledger.iterations.accepted_groups(job_id, 0) == []
    (again,) = await world.claim_all(job_id, "w2")  # no wait, though the first lease had time left
    assert (again.task.group_id, again.attempt) == (claim.task.group_id, 1)  # not the group's fault
    assert await ledger.rollout.submit(job_id, again.entry_id, make_group(again.task, "w2")) is Verdict.ACCEPTED
    assert await ledger.iterations.state(job_id, 0) is IterationState.DRAINED


@pytest.mark.parametrize("state", [JobState.CANCELLING, JobState.FAILED, JobState.SUCCEEDED])
async def test_job_that_does_not_run_takes_no_group(ledger: Ledger, world: World, state: JobState) -> None:
    job_id, _ = await world.open_job()
    first, _ = await world.claim_all(job_id)
    await ledger.jobs.move(job_id, state)
    assert await ledger.rollout.submit(job_id, first.entry_id, make_group(first.task)) is Verdict.CLOSED
    assert await world.claim_all(job_id, "w2") == []


async def test_failed_group_counts_as_done_and_is_reported(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=1)
    (claim,) = await world.claim_all(job_id)
    assert await ledger.rollout.submit(job_id, claim.entry_id, failed_group(claim.task)) is Verdict.ACCEPTED
    fields = await ledger.iterations.fields(job_id, 0)
    assert (fields["state"], fields["num_failed_groups"]) == ("DRAINED", "1")
    (event,) = [event for event in await ledger.event_log.read(job_id) if event.kind == "group.failed"]
    assert "it raised" in event.message


# ---- leases of groups --------------------------------------------------------------------------------------------


async def test_free_group_is_found_behind_many_that_are_held(ledger: Ledger, world: World) -> None:
    """Redis looks at ten held entries for each one that is asked for, and says where to go on."""
    job_id, _ = await world.open_job(num_groups=30)
    assert len(await ledger.rollout.claim(job_id, "alive", 29, lease_s=30)) == 29
    (last,) = await ledger.rollout.claim(job_id, "leaving", 1, lease_s=30)
    await ledger.rollout.release(job_id, "leaving", [last.entry_id])
    (claim,) = await ledger.rollout.claim(job_id, "w2", 1, lease_s=30)
    assert claim.entry_id == last.entry_id


async def test_only_claims_that_failed_count_as_attempts(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=1)
    for _ in range(3):
        (claim,) = await world.claim_all(job_id, "w1")
        assert claim.attempt == 1
        assert await ledger.rollout.release(job_id, "w2", [claim.entry_id]) == []  # it is not its own
        await ledger.rollout.release(job_id, "w1", [claim.entry_id])
        assert await ledger.rollout.release(job_id, "w1", [claim.entry_id]) == []  # said twice, done once
    (claim,) = await world.claim_all(job_id, "w1")
    await ledger.rollout.release(job_id, "w1", [claim.entry_id], is_attempt=True)
    (claim,) = await world.claim_all(job_id, "w2")
    assert claim.attempt == 2
    await ledger.rollout.renew(job_id, "w2", [claim.entry_id])
    await ledger.rollout.release(job_id, "w2", [claim.entry_id])
    (claim,) = await world.claim_all(job_id, "w1")
    assert claim.attempt == 2
    assert await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task, "w1", version=9)) is Verdict.STALE
    (claim,) = await world.claim_all(job_id, "w1")
    assert claim.attempt == 2


async def test_worker_that_lost_its_lease_is_fenced_off(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=1)
    (old,) = await ledger.rollout.claim(job_id, "slow", 1, lease_s=0.01)
    await asyncio.sleep(0.02)
    (new,) = await ledger.rollout.claim(job_id, "w2", 1, lease_s=0.01)
    assert await ledger.rollout.submit(job_id, old.entry_id, make_group(old.task, "slow")) is Verdict.LOST
    assert await ledger.rollout.submit(job_id, new.entry_id, make_group(new.task, "w2")) is Verdict.ACCEPTED
    assert await ledger.rollout.submit(job_id, old.entry_id, make_group(old.task, "slow")) is Verdict.DUPLICATE
    fields = await ledger.iterations.fields(job_id, 0)
    assert (fields["num_lost"], fields["num_duplicate"]) == ("1", "1")
    assert await world.claim_all(job_id, "w3") == []


# ---- the trainer's side of the stream ----------------------------------------------------------------------------


async def test_groups_stay_pending_until_a_checkpoint_covers_them(ledger: Ledger, world: World) -> None:
    async def num_pending(ledger: Ledger, job_id: str) -> int:
        return int((await ledger.redis.xpending(JobKeys(job_id).rollouts, TRAINER_GROUP))["pending"])

    job_id, epoch = await world.open_job()
    await world.drain(job_id)
    taken = await ledger.trainer.take(job_id, "rank-0", 10, 0.1)
    assert [group.group_id for group in taken] == ["0-0", "0-1"]
    await world.commit(job_id, epoch, 0)
    assert await ledger.iterations.accepted_groups(job_id, 0) == taken  # after a crash: the same, in the same order
    assert await num_pending(ledger, job_id) == 2
    for iteration, path in ((1, "/new"), (0, "/old")):  # an older one makes nothing undone
        await ledger.trainer.checkpointed(job_id, epoch, 0, iteration, path)
        fields = await ledger.jobs.fields(job_id)
        assert (fields["checkpoint_iteration"], fields["checkpoint"]) == ("1", "/new")
        assert await num_pending(ledger, job_id) == 0


async def test_restored_checkpoint_touches_no_trimmed_iteration(ledger: Ledger, world: World) -> None:
    """A trainer reports the checkpoint that it starts from, which may contain very many iterations."""
    job_id, epoch = await world.open_job()
    await world.drain(job_id)
    await world.commit(job_id, epoch, 0)

    async def num_acknowledged() -> int:
        before = await num_commands(ledger, "xack")
        await ledger.trainer.checkpointed(job_id, epoch, 0, 1, "/checkpoints/1")
        return await num_commands(ledger, "xack") - before

    assert await num_acknowledged() == 2
    assert await ledger.iterations.trim(job_id, 0, 0)
    assert await num_acknowledged() == 0


async def test_micro_batches_are_in_the_order_of_recording(ledger: Ledger, world: World) -> None:
    job_id, epoch = await world.open_job()
    for rank, index in [(1, 0), *((0, index) for index in range(11))]:  # not in that of names
        await ledger.trainer.record_micro_batch(job_id, epoch, 0, rank, index, [f"0-{rank}{index}"])
    expected = [(1, ["0-10"]), *((0, [f"0-0{index}"]) for index in range(11))]
    assert await ledger.iterations.micro_batches(job_id, 0) == expected


async def test_groups_that_the_trainer_has_are_not_read_again(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job()
    await world.drain(job_id)

    async def accepted(*known: str) -> tuple[list[str], int]:
        before = await num_commands(ledger, "xrange")
        groups = await ledger.iterations.accepted_groups(job_id, 0, known)
        return [group.group_id for group in groups], await num_commands(ledger, "xrange") - before

    assert await accepted() == (["0-0", "0-1"], 1)
    assert await accepted("0-0") == (["0-1"], 1)
    assert await accepted("0-0", "0-1") == ([], 0)


async def test_groups_are_read_a_few_at_a_time(ledger: Ledger, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.streams.ledger.iterations.GROUPS_AT_ONCE", 1)
    monkeypatch.setattr("onbeat.streams.ledger.evaluations.GROUPS_AT_ONCE", 1)
    job_id, _ = await world.open_job()
    tasks = tasks_for(0)
    for task in tasks:
        task.is_evaluation = True
    assert await ledger.evaluations.open(job_id, 0, 0, 3, tasks) == ""
    await world.drain(job_id)
    before = await num_commands(ledger, "xrange")
    assert [group.group_id for group in await ledger.iterations.accepted_groups(job_id, 0)] == ["0-0", "0-1"]
    assert [group.group_id for group in await ledger.evaluations.groups(job_id, 0)] == ["0-0", "0-1"]
    assert await num_commands(ledger, "xrange") - before == 2 + 3


async def test_times_of_generation_are_kept_apart_and_few(ledger: Ledger, world: World) -> None:
    """Each group reports when it was in the engine, before its acceptance; an iteration keeps the union."""
    job_id, _ = await world.open_job(num_groups=4)
    await ledger.redis.hset(JobKeys(job_id).iteration(0), "opened_at", await ledger.now() - 1000)
    claims = await world.claim_all(job_id)
    begun = await ledger.now()

    async def submit(
        generate_s: float, score_s: float, in_engine: list[tuple[float, float]]
    ) -> list[tuple[float, float]]:
        claim = claims.pop()
        group = make_group(claim.task)
        group.timings.generate_s, group.timings.score_s = generate_s, score_s
        for start_s, end_s in in_engine:
            group.timings.in_engine.add(start_s=start_s, end_s=end_s)
        await ledger.rollout.submit(job_id, claim.entry_id, group)
        kept = json.loads((await ledger.iterations.fields(job_id, 0)).get("generated", "[]"))
        return [(round(start - begun), round(end - begun)) for start, end in kept]

    assert await submit(0.0, 5.0, []) == []
    assert await submit(30.0, 10.0, []) == [(-40, -10)]
    assert await submit(20.0, 30.0, [(0.0, 20.0)]) == [(-50, -10)]  # 50 to 30 s ago
    many = await submit(500.0, 400.0, [(10.0 * place, 10.0 * place + 2 + place / 100) for place in range(64)])
    assert len(many) == 64
    assert many[0] == (-900, -898)  # the shortest gap, which is closed, is a later one
    assert many[-1][1] == -10


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_replaced_trainer_leaves_no_overlap(ledger: Ledger, world: World, is_replaced: bool) -> None:
    job_id, epoch = await world.open_job()
    await ledger.redis.hset(JobKeys(job_id).iteration(0), "opened_at", await ledger.now() - 1000)
    await world.drain(job_id)
    if is_replaced:
        await ledger.trainer.renew_job(job_id, epoch, 0.0)
        epoch = await ledger.trainer.claim_job(job_id, "trainer-b", 30) or ""
    spans = [("micro_batch", await ledger.now() - 0.15, 0.1)]
    await world.commit(job_id, epoch, 0, spans=spans)
    (record,) = await read_iterations(ledger, job_id, -1, 9)
    if is_replaced:
        assert record.overlap_frac is None
    else:
        assert record.overlap_frac is not None
        assert 0 < record.overlap_frac <= 1


async def test_granted_micro_batch_is_progress_of_the_job(ledger: Ledger, world: World) -> None:
    job_id, epoch = await world.open_job()

    async def is_progress(index: int, group_id: str) -> bool:
        await ledger.redis.hset(JobKeys(job_id).job, "progress_at", 0)
        await ledger.trainer.record_micro_batch(job_id, epoch, 0, 0, index, [group_id])
        return float((await ledger.jobs.fields(job_id))["progress_at"]) > 0

    assert await is_progress(0, "0-0")
    assert not await is_progress(1, "0-0")  # a replica has it already
    assert await is_progress(1, "0-1")


async def test_reader_of_events_waits_for_the_next(ledger: Ledger, world: World) -> None:
    job_id = await world.create_job()
    (created,) = await ledger.event_log.read(job_id)
    waiting = asyncio.create_task(ledger.event_log.read(job_id, after=created.id, timeout_s=5))
    await asyncio.sleep(0.02)
    await ledger.event_log.emit(job_id, "test.hello", "hello", {"n": 1})
    (event,) = await waiting
    assert (event.kind, event.message, event.data) == ("test.hello", "hello", {"n": 1})


# ---- the client --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_pipeline", [False, True])
async def test_cancelled_task_ends_wherever_its_command_stands(is_pipeline: bool, ledger: Ledger) -> None:
    """redis-py forgets a cancellation in one moment of sending (Python < 3.12); a service would then never stop."""

    async def work() -> None:
        while True:
            if is_pipeline:
                await group_states(ledger.redis, [("onbeat:nobody", "nothing")])
            else:
                await ledger.event_log.read("nobody", timeout_s=0.001)

    for num_turns in range(40):
        task = asyncio.create_task(work())
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        _, running = await asyncio.wait([task], timeout=5)
        assert not running, f"cancelled after {num_turns} turns of the loop"


async def test_silent_redis_is_given_up_in_time() -> None:
    """The health checks are retried within each retry of a command: without a limit the tries would multiply."""
    server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(60), "127.0.0.1", 0)
    client = connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}?socket_timeout=0.2", retry_s=4)
    started = time.monotonic()
    with pytest.raises(RedisTimeout, match=r"no answer within 4\.2 s"):
        await client.get("anything")
    with pytest.raises(RedisTimeout, match=r"no answer within 4\.2 s"):
        await client.pipeline().get("anything").execute()
    assert time.monotonic() - started < 15
    await client.aclose()
    server.close()


# ---- many submissions at once ----------------------------------------------------------------------------------------


async def test_simultaneous_submissions_share_round_trips_not_answers(ledger: Ledger, world: World) -> None:
    async def num_reads(ledger: Ledger) -> int:
        return int((await ledger.redis.info("stats"))["total_reads_processed"])

    job_id, _ = await world.open_job(num_groups=100)
    claims = await world.claim_all(job_id)
    groups = [
        make_group(claim.task, version=claim.task.policy_version + index % 2) for index, claim in enumerate(claims)
    ]
    before = await num_commands(ledger, "evalsha"), await num_reads(ledger)
    verdicts = await asyncio.gather(
        *(ledger.rollout.submit(job_id, claim.entry_id, group) for claim, group in zip(claims, groups, strict=True))
    )
    assert verdicts == [Verdict.ACCEPTED, Verdict.STALE] * 50
    assert await num_commands(ledger, "evalsha") - before[0] == 100
    assert await num_reads(ledger) - before[1] < 60  # not one for each


async def test_cancelled_submission_takes_no_other_along(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=10)
    claims = await world.claim_all(job_id)
    tasks = [
        asyncio.create_task(ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task))) for claim in claims
    ]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    assert await asyncio.gather(*tasks[1::2]) == [Verdict.ACCEPTED] * 5


async def test_an_error_that_redis_does_not_know_reaches_all_who_wait(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=3)
    claims = await world.claim_all(job_id)
    await ledger.rollout.submit(job_id, claims[0].entry_id, make_group(claims[0].task))
    calls = [ledger.rollout._submission([job_id], [argument]) for argument in ("right", object(), "right")]
    async with asyncio.timeout(30):
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, DataError) for outcome in outcomes)
    assert await ledger.rollout.submit(job_id, claims[1].entry_id, make_group(claims[1].task)) is Verdict.ACCEPTED


async def test_scripts_that_redis_has_forgotten_run_each_call_once(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=2)
    claims = await world.claim_all(job_id)
    await ledger.redis.script_flush()
    script = BatchedScript(ledger.redis, ledger.redis.register_script("return redis.call('INCR', KEYS[1])"))
    counter = JobKeys(job_id).busy(0) + ":calls"
    assert await asyncio.gather(*(script([counter], []) for _ in range(5))) == [1, 2, 3, 4, 5]
    await world.submit_groups(job_id, claims)
    await ledger.redis.delete(counter)


async def test_prompt_deleted_during_its_claim_stops_no_other(ledger: Ledger, world: World) -> None:
    job_id, _ = await world.open_job(num_groups=3)
    claims = await ledger.rollout.claim(job_id, "w1", 3, lease_s=0.01)
    await ledger.redis.xdel(JobKeys(job_id).prompts, claims[1].entry_id)
    await asyncio.sleep(0.02)
    again = await ledger.rollout.claim(job_id, "w2", 3, lease_s=0.01)
    assert [claim.task.group_id for claim in again] == ["0-0", "0-2"]


async def num_commands(ledger: Ledger, name: str) -> int:
    stats = await ledger.redis.info("commandstats")
    return int(stats.get(f"cmdstat_{name}", {}).get("calls", 0))


# ---- a trainer that makes a version again ----------------------------------------------------------------------------


async def test_version_announced_again_must_have_the_same_bits(ledger: Ledger, world: World) -> None:
    """Rollouts may hold the first ones: the trainer died between publishing and committing."""
    job_id, epoch = await world.open_job()
    await ledger.versions.announce(job_id, epoch, 1, "127.0.0.1:1", "first")
    await ledger.versions.announce(job_id, epoch, 1, "127.0.0.1:2", "first")
    with pytest.raises(JobFailed, match="other bits"):
        await ledger.versions.announce(job_id, epoch, 1, "127.0.0.1:3", "second")
    assert (await ledger.jobs.fields(job_id))["weights_address"] == "127.0.0.1:2"


async def test_many_may_wait_at_once(redis_url: str) -> None:
    """Long polls and active jobs: each has a connection of its own while it waits."""
    client = connect(redis_url, retry_s=5)
    waits = [client.blpop(f"nothing-{number}", timeout=1) for number in range(150)]
    assert await asyncio.gather(*waits) == [None] * 150
    await client.aclose()


# ---- processes ---------------------------------------------------------------------------------------------------


async def test_liveness_does_not_depend_on_clocks_of_machines(
    ledger: Ledger, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollout's clock is an hour behind, and that of who asks an hour ahead."""
    pool, now = f"pool-{secrets.token_hex(4)}", time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    await ledger.workers.heartbeat(pool, WorkerRecord(id="a", state="idle"))
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    await world.beat(pool, WorkerRecord(id="silent", state="idle"), ago_s=SILENT_S + 1)
    await ledger.workers.heartbeat(pool, WorkerRecord(id="ended", state="stopped"))
    assert [worker.id for worker in await ledger.workers.live(pool)] == ["a"]
