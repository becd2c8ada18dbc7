"""Supervised iterations in the ledger: opened with rows, whose tokens the job's trainer records once."""

import json

import pytest

from onbeat.contracts.errors import LeaseLost
from onbeat.contracts.states import IterationState
from onbeat.streams.codec import GroupFailure, Response, RolloutGroup, encode_group
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker.auditor import run_audit
from services.broker.doctor.verdict import read_verdict
from services.broker.samples import group_samples
from services.broker.views.groups import group_detail
from tests.world import World, make_group, tasks_for

ROWS = [json.dumps({"row": number, "messages": []}) for number in range(2)]
START = {"data": {"type": "jsonl", "path": "examples.jsonl"}, "num_rows_per_iteration": 2, "num_iterations": 2}


def row_groups(iteration: int, *, is_dropped: bool = False) -> list[RolloutGroup]:
    groups = []
    for index in range(2):
        group = RolloutGroup(group_id=f"{iteration}-{index}", iteration=iteration, policy_version=iteration)
        group.is_supervised, group.worker_id = True, "trainer-a"
        if is_dropped and index:
            group.failure.CopyFrom(GroupFailure(kind="row_too_long", message="it has 9 tokens"))
        else:
            group.prompt_token_ids.extend([1, 2])
            group.responses.append(Response(token_ids=[3, 4 + index], has_no_reward=True))
        groups.append(group)
    return groups


async def open_rows(world: World, **sections: object) -> tuple[str, str]:
    job_id, epoch = await world.started_job(warm_start=START, **sections)
    assert await world.ledger.iterations.open_rows(job_id, 0, ROWS) == ""
    return job_id, epoch


async def test_rows_are_opened_once_and_in_order(world: World, ledger: Ledger) -> None:
    job_id, _ = await open_rows(world)
    assert await ledger.iterations.rows(job_id, 0) == {"0-0": ROWS[0], "0-1": ROWS[1]}
    assert await ledger.iterations.open_rows(job_id, 0, ROWS) == "next to open is 1"
    assert await ledger.iterations.open_rows(job_id, 1, ROWS) == "next to commit is 0"
    assert await world.claim_all(job_id) == [], "no rollout gets rows"


async def test_tokens_of_rows_are_recorded_once(world: World, ledger: Ledger) -> None:
    job_id, epoch = await open_rows(world)
    groups = row_groups(0)
    await ledger.trainer.record_rows(job_id, epoch, 0, "trainer-a", groups)
    others = row_groups(0)
    others[0].responses[0].token_ids[0] = 9
    await ledger.trainer.record_rows(job_id, epoch, 0, "trainer-a", others)
    assert await ledger.iterations.accepted_groups(job_id, 0) == groups
    assert await ledger.iterations.state(job_id, 0) is IterationState.DRAINED
    assert await ledger.iterations.rows(job_id, 0) == {}
    assert await ledger.trainer.take(job_id, "rank-0", 10, 0.1) == groups


async def test_a_trainer_without_the_lease_records_no_rows(world: World, ledger: Ledger) -> None:
    job_id, _ = await open_rows(world)
    with pytest.raises(LeaseLost):
        await ledger.trainer.record_rows(job_id, "0", 0, "zombie", row_groups(0))
    assert await ledger.iterations.state(job_id, 0) is IterationState.OPEN


async def warm_started(world: World) -> str:
    """Return a job after two supervised iterations, the first of which was not published, and one of RL."""
    job_id, epoch = await open_rows(world)
    for iteration in range(2):
        if iteration:
            assert await world.ledger.iterations.open_rows(job_id, iteration, ROWS) == ""
        groups = row_groups(iteration, is_dropped=bool(iteration))
        await world.ledger.trainer.record_rows(job_id, epoch, iteration, "trainer-a", groups)
        assert await world.commit(job_id, epoch, iteration, is_published=bool(iteration))
    assert await world.ledger.iterations.open(job_id, 2, 2, tasks_for(2)) == ""
    await world.drain(job_id)
    assert await world.commit(job_id, epoch, 2)
    return job_id


async def test_a_warm_start_and_rl_have_a_clean_audit(world: World, ledger: Ledger) -> None:
    job_id = await warm_started(world)
    report = await run_audit(ledger, job_id)
    assert report.is_clean, report.violation
    assert (report.num_commits, report.num_contents, report.num_failed_groups) == (3, 6, 1)


async def test_a_changed_row_is_seen(world: World, ledger: Ledger) -> None:
    job_id = await warm_started(world)
    (entry, *_) = await ledger.iterations.accepted_entries(job_id, 0)
    group = row_groups(0)[0]
    group.responses[0].token_ids[1] = 8
    rollouts = JobKeys(job_id).rollouts
    stored = await ledger.redis.xrange(rollouts)
    await ledger.redis.delete(rollouts)
    for place, fields in stored:
        payload = encode_group(group) if place.decode() == entry else fields[b"group"]
        await ledger.redis.xadd(rollouts, fields | {b"group": payload}, id=place)
    assert "group 0-0" in str((await run_audit(ledger, job_id)).violation)


async def test_rows_are_in_the_audit_log(world: World, ledger: Ledger) -> None:
    lines = [entry.line.split("\t") for entry in await ledger.audit_log.entries(await warm_started(world), "-")]
    assert [line[0] for line in lines][2:6] == ["rows", "accepted", "accepted", "committed"]
    assert lines[3][3:5] == ["", "trainer-a"], "no version generated a row"


async def test_the_verdict_begins_with_rl(world: World, ledger: Ledger) -> None:
    """Supervised iterations have no reward, and do not tell how long others take."""
    job_id, epoch = await open_rows(world, schedule={"num_iterations": 9})
    for iteration in range(2):
        await ledger.iterations.open_rows(job_id, iteration, ROWS)
        await ledger.trainer.record_rows(job_id, epoch, iteration, "trainer-a", row_groups(iteration))
        assert await world.commit(job_id, epoch, iteration)
        assert await read_verdict(ledger, await ledger.jobs.fields(job_id)) == ""
    await world.run_iteration(job_id, epoch, 2, reward_mean=0.25)
    assert await read_verdict(ledger, await ledger.jobs.fields(job_id)) == "reward 0.25"
    await world.run_iteration(job_id, epoch, 3, reward_mean=0.75)
    verdict = await read_verdict(ledger, await ledger.jobs.fields(job_id))
    assert verdict.startswith("reward 0.25 to 0.75; ")
    assert verdict.endswith(" left")


def test_samples_and_groups_say_that_they_are_rows() -> None:
    """Leave the field out of those of rollouts, as before."""
    (row, _), group = row_groups(0), make_group(tasks_for(0)[0])
    for source, is_row in ((row, True), (group, False)):
        shown = [next(group_samples(source)), group_detail(source)]
        assert [record.model_dump().get("is_supervised") for record in shown] == [True if is_row else None] * 2
