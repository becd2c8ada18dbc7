"""Retention on a real Redis: deleted jobs and the contents of old iterations go, all else stays."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError, OutOfMemoryError

from onbeat.contracts.completions import CompletionRequest, Message
from onbeat.contracts.errors import GroupsTrimmed, JobDeleted, JobNotFinal, JobNotFound, LeaseLost, OnbeatError
from onbeat.contracts.records import PublishedWeights, WeightUpdate
from onbeat.contracts.states import JobState
from onbeat.streams import keys
from onbeat.streams.chat import Chats
from onbeat.streams.codec import PromptTask, Response, RolloutGroup
from onbeat.streams.connection import connect
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.job_lists import FINAL
from onbeat.streams.outcomes import Outcome
from services.broker.auditor import run_audit
from services.broker.retention import DAY_S, NEVER_CREATED_S, Retention
from services.trainer.replay import read_record
from tests.broker_fixtures import running_broker
from tests.conftest import own_redis, unfinished
from tests.waiting import eventually
from tests.world import World, job_body, make_group, tasks_for

WEIGHTS = PublishedWeights(full_bytes=1, encode_s=0.0, publish_s=0.0)
UPDATE = WeightUpdate(received_bytes=1, pull_s=0.0, apply_s=0.0, load_s=0.0)


async def keys_of(ledger: Ledger, job_id: str) -> set[str]:
    """Return the job's keys without their common prefix."""
    prefix = f"onbeat:{{{job_id}}}:"
    return {key.decode().removeprefix(prefix) async for key in ledger.redis.scan_iter(f"{prefix}*", count=10_000)}


async def run_job(ledger: Ledger, num_iterations: int = 3, **sections: Any) -> tuple[str, str]:
    """Run a job that uses every key, to its last commit; return (job id, epoch)."""
    job_id, epoch = await World(ledger).started_job(schedule={"num_iterations": num_iterations}, **sections)
    for iteration in range(num_iterations):
        await ledger.versions.announce(job_id, epoch, iteration, "127.0.0.1:1", f"d{iteration}", WEIGHTS)
        await ledger.versions.engine_ready(job_id, iteration, "w1", UPDATE)
        tasks = tasks_for(iteration)
        for row, task in enumerate(tasks):
            task.data_row = row
        assert await ledger.iterations.open(job_id, iteration, iteration, tasks) == ""
        for claim in await World(ledger).claim_all(job_id):
            group = make_group(claim.task)
            group.data_row = claim.task.data_row
            outcome = Outcome(claim.task.data_row, 1, 2)
            await ledger.rollout.submit(job_id, claim.entry_id, group, outcome=outcome)
        group_ids = [task.group_id for task in tasks]
        assert await ledger.trainer.record_micro_batch(job_id, epoch, iteration, 0, 0, group_ids) == group_ids
        assert await World(ledger).commit(job_id, epoch, iteration)
        await ledger.iterations.record_traced(job_id, iteration + 1)
    chats = Chats(ledger.redis, job_id)
    asked = CompletionRequest(model=job_id, messages=[Message(role="user", content="2+2=")])
    await chats.ask("hello", asked, max_waiting=1)
    await chats.close("hello")
    return job_id, epoch


async def over(ledger: Ledger, job_id: str) -> str:
    await ledger.jobs.move(job_id, JobState.FAILED, "over")
    return job_id


# ---- deleting a job --------------------------------------------------------------------------------------------------


async def test_deleted_job_leaves_only_the_mark_that_refuses_its_id(ledger):
    async def evaluate(ledger: Ledger, job_id: str, evaluation: int) -> None:
        """Leave an evaluation half done: so it has all of its keys."""
        tasks = tasks_for(evaluation)
        for index, task in enumerate(tasks):
            task.group_id, task.is_evaluation = f"eval-{evaluation}-{index}", True
        version = int((await ledger.jobs.fields(job_id))["policy_version"])
        assert await ledger.evaluations.open(job_id, evaluation, version, evaluation + 1, tasks) == ""
        claim = (await World(ledger).claim_all(job_id, count=1))[0]
        await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task))

    job_id, _ = await run_job(ledger)
    await evaluate(ledger, job_id, 0)
    assert await ledger.iterations.open(job_id, 3, 3, tasks_for(3), [PromptTask(group_id="3-2", iteration=3)]) == ""
    every_key = JobKeys(job_id)
    await ledger.redis.hset(every_key.lost_rollouts, "0-1", '["rollout-0"]')
    await ledger.redis.sadd(every_key.notices, "end")
    for key in (every_key.outcomes_before, every_key.held_out_rows, every_key.rows(3)):
        await ledger.redis.hset(key, "rows", "{}")
    names = {name.partition(":")[0] for name in await keys_of(ledger, job_id)}
    known = {key.rpartition("}:")[2].partition(":")[0] for key in (*every_key.of_job, *every_key.numbered(0))}
    assert names == known | {"job"}  # else the rest of this test would show nothing
    await over(ledger, job_id)
    await ledger.jobs.delete(job_id)
    assert await keys_of(ledger, job_id) == {"deleted"}
    assert 0 < await ledger.redis.ttl(every_key.deleted) <= DAY_S
    assert job_id not in await ledger.jobs.ids()
    with pytest.raises(JobNotFound):
        await ledger.jobs.fields(job_id)


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING, JobState.PAUSED, JobState.CANCELLING])
async def test_job_that_is_not_over_cannot_be_deleted(ledger, world, state):
    job_id = await world.create_job()
    for step in {JobState.PENDING: [], JobState.RUNNING: [state]}.get(state, [JobState.RUNNING, state]):
        await ledger.jobs.move(job_id, step)
    with pytest.raises(JobNotFinal, match=f"is {state}; only a job that is over can be deleted: cancel it first"):
        await ledger.jobs.delete(job_id)
    assert await ledger.jobs.state(job_id) is state


async def test_large_job_goes_in_small_steps(ledger, world):
    job_id, num_iterations = await over(ledger, await world.create_job()), 3000
    job, pipeline = JobKeys(job_id), ledger.redis.pipeline(transaction=False)
    pipeline.hset(job.job, "num_opened", num_iterations)
    for number in range(num_iterations + 1):  # an evaluation and a version come after the last iteration
        for key in job.numbered(number):
            pipeline.set(key, "x")
    await pipeline.execute()

    async def num_unlinks():
        return int((await ledger.redis.info("commandstats")).get("cmdstat_unlink", {"calls": 0})["calls"])

    before = await num_unlinks()
    await ledger.jobs.delete(job_id)
    assert await num_unlinks() - before > 30
    assert await keys_of(ledger, job_id) == {"deleted"}


@pytest.mark.parametrize("num_done", [0, 1, 2, 3])
async def test_interrupted_deletion_shows_no_half_job_and_is_finished(ledger, tmp_path, monkeypatch, num_done):
    job_id, _ = await run_job(ledger, num_iterations=1)
    await over(ledger, job_id)
    monkeypatch.setattr("onbeat.streams.ledger.jobs.UNLINKED_AT_ONCE", 1)
    monkeypatch.setattr("services.broker.retention.PAUSE_S", 0.01)  # other tests have left many jobs
    with monkeypatch.context() as dying:
        calls = iter(range(num_done))
        unlink = ledger.redis.unlink

        async def unlink_or_die(*names):
            if next(calls, None) is None:
                raise ConnectionError("the broker dies here")
            await unlink(*names)

        async def die(*_):
            raise ConnectionError("the broker dies here")

        dying.setattr(ledger.redis, "unlink", unlink_or_die)
        dying.setattr(ledger.lists, "remove", die)  # the last step of all
        with pytest.raises(ConnectionError):
            await ledger.jobs.delete(job_id)
    assert job_id in await ledger.jobs.ids()
    async with running_broker(ledger, tmp_path) as broker:  # the broker's first look finishes it
        assert (await broker.get(f"/v1/jobs/{job_id}")).status_code == 404
        assert job_id not in [job["id"] for job in (await broker.get("/v1/jobs?limit=500")).json()["jobs"]]

        async def is_gone():
            return job_id not in await ledger.jobs.ids()

        await eventually("the deletion is finished", is_gone, timeout_s=60)
    assert await keys_of(ledger, job_id) == {"deleted"}


async def test_two_deletions_at_once_are_one(ledger):
    job_id, _ = await run_job(ledger)
    await over(ledger, job_id)
    await asyncio.gather(*(ledger.jobs.delete(job_id) for _ in range(5)))
    assert await keys_of(ledger, job_id) == {"deleted"}


async def test_jobs_are_deleted_while_redis_is_full(tmp_path):
    with own_redis(tmp_path / "redis") as url:
        async with connect(url, retry_s=5) as redis:
            ledger = Ledger(redis)
            by_hand, *by_age = [(await run_job(ledger))[0] for _ in range(3)]
            for job_id in (by_hand, *by_age):
                await over(ledger, job_id)
            for job_id in by_age:
                await redis.hset(JobKeys(job_id).job, "finished_at", 1.0)
            await redis.config_set("maxmemory", 1)  # also when the jobs are gone
            with pytest.raises(OutOfMemoryError):
                await redis.set("anything", "1")
            await Retention(ledger, 1.0).step()
            with pytest.raises(OutOfMemoryError):  # the last step, which sets the mark, fails
                await ledger.jobs.delete(by_hand)
            for job_id in (by_hand, *by_age):
                assert not await redis.exists(*JobKeys(job_id).of_job)
            await redis.config_set("maxmemory", 0)
            await Retention(ledger, 1.0).step()
            for job_id in (by_hand, *by_age):
                assert await keys_of(ledger, job_id) == {"deleted"}
                assert job_id not in await ledger.jobs.ids()


async def test_late_request_does_not_hide_a_half_done_deletion(ledger):
    job_id, _ = await run_job(ledger)
    await over(ledger, job_id)
    job, config = JobKeys(job_id), json.loads((await ledger.jobs.fields(job_id))["config"])
    await ledger.jobs._run("delete_job", job, [job.deleted], *FINAL)  # then the broker died
    with pytest.raises(JobDeleted):
        await ledger.jobs.create(job_id, config, 3, 0)
    await Retention(ledger, 0).step()
    assert await keys_of(ledger, job_id) == {"deleted"}


async def test_delete_over_rest(broker):
    headers = {"Idempotency-Key": uuid.uuid4().hex}

    async def create():
        return await broker.post("/v1/jobs", json=job_body(), headers=headers)

    path = f"/v1/jobs/{(await create()).json()['id']}"
    refused = await broker.delete(path)
    assert refused.status_code == 409
    assert "is PENDING; only a job that is over can be deleted: cancel it first" in refused.json()["detail"]
    await broker.post(f"{path}:cancel")
    assert ((await broker.delete(path)).status_code, (await broker.delete(path)).status_code) == (204, 204)
    assert (await broker.get(path)).status_code == 404
    late = await create()  # a repetition of the request that created it
    assert late.status_code == 409
    assert "was deleted; take a new Idempotency-Key" in late.json()["detail"]
    assert (await broker.delete("/v1/jobs/nobody")).status_code == 404


# ---- whoever still works for a deleted job ---------------------------------------------------------------------------

Call = Callable[[Ledger, str], Coroutine[Any, Any, Any]]

# By script. The answers differ; that none of them writes is what counts.
ROW = RolloutGroup(
    group_id="0-0", prompt_token_ids=[1], responses=[Response(token_ids=[2], has_no_reward=True)], is_supervised=True
)
LATE_CALLS: dict[str, Call] = {
    "record_sharing": lambda ledger, job: ledger.jobs.record_sharing(job, "cores"),
    "announce_version": lambda ledger, job: ledger.versions.announce(job, "1", 1, "h:1", "d", WEIGHTS),
    "checkpointed": lambda ledger, job: ledger.trainer.checkpointed(job, "1", 0, 1, "/c"),
    "claim_groups": lambda ledger, job: ledger.rollout.claim(job, "w1", 9, 30.0),
    "claim_job": lambda ledger, job: ledger.trainer.claim_job(job, "trainer-a", 30.0),
    "commit_iteration": lambda ledger, job: ledger.trainer.commit(job, "1", 0, 1, "d", {}, "u"),
    "create_job": lambda ledger, job: ledger.jobs.create(job, {"name": "n", "pool": "p"}, 1, 0),
    "delete_job": lambda ledger, job: ledger.jobs.delete(job),
    "drop_foreign": lambda ledger, job: ledger._run(
        "drop_foreign", JobKeys(job), [JobKeys(job).rollouts], "trainer", "1-1"
    ),
    "emit_event": lambda ledger, job: ledger.event_log.emit(job, "worker.left", "w1"),
    "emit_silence": lambda ledger, job: ledger.event_log.emit_silence(job, "w1", 0.0, "it is silent"),
    "end_evaluation": lambda ledger, job: ledger.evaluations.fail(job, 0, 1, "given up"),
    "engine_ready": lambda ledger, job: ledger.versions.engine_ready(job, 1, "w1", UPDATE),
    "move_job": lambda ledger, job: ledger.jobs.move(job, JobState.FAILED),
    "open_evaluation": lambda ledger, job: ledger.evaluations.open(job, 0, 0, 1, tasks_for(0)),
    "open_iteration": lambda ledger, job: ledger.iterations.open(job, 0, 0, tasks_for(0)),
    "open_rows": lambda ledger, job: ledger.iterations.open_rows(job, 0, ["{}"], ["{}"]),
    "read_job": lambda ledger, job: ledger.jobs.read([job]),
    "record_dtype": lambda ledger, job: ledger.trainer.record_dtype(job, "1", "float32", "by itself"),
    "record_micro_batch": lambda ledger, job: ledger.trainer.record_micro_batch(job, "1", 0, 0, 0, ["0-0"]),
    "record_rows": lambda ledger, job: ledger.trainer.record_rows(job, "1", 0, "trainer-a", [ROW]),
    "record_row_tokens": lambda ledger, job: ledger.trainer.record_row_tokens(job, "1", 512, "by itself"),
    "record_teacher": lambda ledger, job: ledger.trainer.record_teacher(job, "1", "d"),
    "release_job": lambda ledger, job: ledger.trainer.release_job(job, "run-1"),
    "renew_groups": lambda ledger, job: ledger.rollout.release(job, "w1", ["1-1"]),
    "renew_job": lambda ledger, job: ledger.trainer.renew_job(job, "1", 30.0, "training"),
    "resume_job": lambda ledger, job: ledger.jobs.resume(job, JobState.FAILED),
    "submit_group": lambda ledger, job: ledger.rollout.submit(job, "1-1", make_group(tasks_for(0)[0])),
    "trim_iteration": lambda ledger, job: ledger.iterations.trim(job, 0, 1),
}


def test_every_script_is_tried_on_a_deleted_job():
    scripts = {path.stem for path in (Path(keys.__file__).parent / "scripts").glob("*.lua")}
    assert LATE_CALLS.keys() == scripts - {"prelude"}


@pytest.mark.parametrize("script", LATE_CALLS)
async def test_late_call_brings_no_key_of_a_deleted_job_back(ledger, world, script):
    job_id = await over(ledger, await world.create_job())
    await ledger.jobs.delete(job_id)
    with contextlib.suppress(LeaseLost, JobNotFound, JobDeleted, AssertionError):  # said so
        await LATE_CALLS[script](ledger, job_id)
    assert await keys_of(ledger, job_id) == {"deleted"}
    assert job_id not in await ledger.jobs.ids()


async def test_trainer_waiting_for_groups_of_a_deleted_job_loses_it(ledger, world):
    job_id = await world.create_job()
    waiting = asyncio.create_task(ledger.trainer.take(job_id, "rank-0", 1, timeout_s=1.0))
    await asyncio.sleep(0.2)
    await over(ledger, job_id)
    await ledger.jobs.delete(job_id)
    with contextlib.suppress(LeaseLost):  # Redis 7 ends the call at once, an older one when its time is up
        assert await waiting == []
    with pytest.raises(LeaseLost, match="was deleted"):
        await ledger.trainer.take(job_id, "rank-0", 1, timeout_s=0.01)


# ---- contents of old iterations --------------------------------------------------------------------------------------


async def kept_groups(ledger: Ledger, job_id: str) -> list[str]:
    entries = await ledger.redis.xrange(JobKeys(job_id).rollouts)
    return sorted(fields[b"group_id"].decode() for _, fields in entries)


async def interleaved_job(ledger: Ledger) -> tuple[str, str]:
    """Bounded, keeps 1: entries of iterations 1 and 2 alternate in the stream. 0 and 1 are committed, 2 is drained."""
    bounded = {"mode": "bounded", "max_staleness": 2, "num_iterations": 9}
    job_id, epoch = await World(ledger).started_job(schedule=bounded, retention={"rollout_iterations": 1})
    claims = []
    for iteration in range(3):
        assert await ledger.iterations.open(job_id, iteration, 0, tasks_for(iteration)) == ""
        claims.append(await World(ledger).claim_all(job_id))
    alternating = [claim for pair in zip(claims[1], claims[2], strict=True) for claim in pair]
    await World(ledger).submit_groups(job_id, alternating + claims[0])
    for iteration in range(2):
        await ledger.trainer.record_micro_batch(job_id, epoch, iteration, 0, 0, [f"{iteration}-0", f"{iteration}-1"])
        assert await World(ledger).commit(job_id, epoch, iteration)
    return job_id, epoch


async def test_exactly_the_entries_of_old_durable_iterations_go(ledger):
    job_id, epoch = await interleaved_job(ledger)
    retention, everything = Retention(ledger, 0), [f"{i}-{k}" for i in range(3) for k in range(2)]
    await retention.step()
    assert await kept_groups(ledger, job_id) == everything  # no checkpoint: a trainer may need all
    await ledger.trainer.checkpointed(job_id, epoch, 0, 1, "/c/1")
    await retention.step()
    assert await kept_groups(ledger, job_id) == everything  # the newest durable one is kept
    await ledger.trainer.checkpointed(job_id, epoch, 1, 2, "/c/2")
    await asyncio.gather(*(retention.step() for _ in range(3)))
    assert await kept_groups(ledger, job_id) == everything[2:]
    assert [group.group_id for group in await ledger.iterations.accepted_groups(job_id, 1)] == ["1-0", "1-1"]
    assert not {"micro_batches:0", "taken:0"} & await keys_of(ledger, job_id)
    assert {"micro_batches:1", "taken:1"} <= await keys_of(ledger, job_id)
    report = await run_audit(ledger, job_id)
    assert report.is_clean, report.violation
    assert (report.num_groups, report.num_contents, report.num_contents_gone) == (6, 4, 2)


async def test_running_job_is_trimmed_however_many_others_there_are(ledger, world):
    job_id, epoch = await interleaved_job(ledger)
    await ledger.trainer.checkpointed(job_id, epoch, 0, 2, "/c/2")
    broken = await world.create_job()
    await ledger.jobs.move(broken, JobState.RUNNING)
    await ledger.redis.hset(JobKeys(broken).job, mapping={"config": "{", "checkpoint_iteration": "1"})
    await Retention(ledger, 0).trim_started()
    assert len(await kept_groups(ledger, job_id)) == 4


@pytest.mark.parametrize(("iteration", "num_kept"), [(1, 1), (0, 2), (0, 1)])
async def test_iteration_is_trimmed_only_in_its_turn(ledger, iteration, num_kept):
    job_id, epoch = await interleaved_job(ledger)
    await ledger.trainer.checkpointed(job_id, epoch, 0, 2, "/c/2")
    is_due = (iteration, num_kept) == (0, 1)
    assert await ledger.iterations.trim(job_id, iteration, num_kept) is is_due
    assert not await ledger.iterations.trim(job_id, iteration, num_kept)
    assert len(await kept_groups(ledger, job_id)) == (4 if is_due else 6)


async def test_asking_for_groups_that_are_gone_gives_the_reason(ledger, tmp_path):
    job_id, epoch = await interleaved_job(ledger)
    await ledger.trainer.checkpointed(job_id, epoch, 0, 2, "/c/2")
    await Retention(ledger, 0).step()
    reason = "iteration 0 .* no longer kept .*, only those from iteration 1 on"
    with pytest.raises(GroupsTrimmed, match=reason):
        await ledger.iterations.accepted_groups(job_id, 0)
    with pytest.raises(OnbeatError, match=reason):
        await read_record(ledger, job_id, 0, 1)
    await ledger.jobs.move(job_id, JobState.PAUSED)  # else the broker goes on with it
    async with running_broker(ledger, tmp_path) as broker:
        gone = await broker.get(f"/v1/jobs/{job_id}/samples?iteration=0")
        assert gone.status_code == 410
        assert "no longer kept" in gone.json()["detail"]
        kept = (await broker.get(f"/v1/jobs/{job_id}/samples?iteration=1")).json()["samples"]
        assert [sample["group_id"] for sample in kept] == ["1-0", "1-1"] * 2
        assert (await broker.get(f"/v1/jobs/{job_id}/samples")).json()["samples"][0]["iteration"] == 2


async def test_late_group_of_a_trimmed_iteration_changes_nothing(ledger):
    job_id, epoch = await run_job(ledger, num_iterations=2, retention={"rollout_iterations": 1})
    await ledger.trainer.checkpointed(job_id, epoch, 0, 2, "/c/2")
    await Retention(ledger, 0).step()
    before = await kept_groups(ledger, job_id)
    assert await ledger.rollout.submit(job_id, "1-1", make_group(tasks_for(0)[0])) == "duplicate"
    assert await kept_groups(ledger, job_id) == before == ["1-0", "1-1"]


async def test_default_keeps_what_lies_between_two_checkpoints(ledger, world):
    for every, kept in ((1, 50), (50, 50), (80, 80)):
        job_id = await world.create_job(checkpoint={"every_iterations": every})
        config = json.loads((await ledger.jobs.fields(job_id))["config"])
        assert config["retention"] == {"rollout_iterations": kept}


# ---- jobs that were over long ago ------------------------------------------------------------------------------------


async def test_only_final_jobs_that_are_old_enough_are_deleted(ledger, world):
    old, young = await over(ledger, await world.create_job()), await over(ledger, await world.create_job())
    running = await world.create_job()
    long_ago = await ledger.now() - 11 * DAY_S
    await ledger.redis.hset(JobKeys(old).job, "finished_at", long_ago)
    await ledger.redis.hset(JobKeys(running).job, "finished_at", long_ago)
    await Retention(ledger, 0).step()
    assert {old, young, running} <= set(await ledger.jobs.ids())
    await Retention(ledger, 10).step()
    assert {old, young, running} & set(await ledger.jobs.ids()) == {young, running}


async def test_id_that_never_became_a_job_is_forgotten_after_a_while(ledger):
    dead, newborn, now = uuid.uuid4().hex, uuid.uuid4().hex, await ledger.now()
    listed = {dead: now - NEVER_CREATED_S - 60, newborn: now}
    for index in (keys.ALL_JOBS, keys.ACTIVE_JOBS):
        await ledger.redis.zadd(index, listed)
    await Retention(ledger, 0).step()
    assert {dead, newborn} & set(await ledger.jobs.ids()) == {newborn}
    assert dead not in await unfinished(ledger)
    await ledger.jobs.forget(newborn)
