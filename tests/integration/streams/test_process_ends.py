"""The ends of processes: told once to the jobs that they served, and no lease outlives the run that held it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from onbeat.contracts.errors import LeaseLost
from onbeat.contracts.records import TrainerRecord, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.local.stack import StackOptions, service_specs, tell_end_of_service
from onbeat.local.supervisor import ServiceEnd
from onbeat.streams.inspection import newest_events
from onbeat.streams.ledger import Ledger
from onbeat.streams.process_ends import ProcessEnd, tell_end
from services.broker.doctor.explain import explain_job
from services.broker.silence import tell_silence
from services.trainer.settings import Settings
from tests.world import World


def end_of(process: str, run: str = "") -> ProcessEnd:
    return ProcessEnd(process, run, 137, f"{process} was killed by SIGKILL; restart 1 of 4")


async def ends_told_of(ledger: Ledger, job_id: str) -> list[str]:
    events = await newest_events(ledger, job_id)
    return [f"{event.kind} {event.data['process']}" for event in events if event.kind.startswith("process.")]


async def test_restarted_trainer_need_not_wait_for_its_lease(ledger: Ledger, world: World) -> None:
    pool = "restarts"
    job_id = await world.create_job(pool=pool)
    old = await ledger.trainer.claim_job(job_id, "trainer-0", 600, "run-1")
    assert old is not None
    assert await ledger.trainer.claim_job(job_id, "trainer-0", 600, "run-2") is None, "the lease is alive"
    assert await tell_end(ledger.redis, pool, end_of("trainer-0", "run-1")) == 1
    (lost, *_) = await explain_job(ledger, job_id)
    assert (lost.sentence, lost.is_problem) == ("trainer-0 was killed by SIGKILL; restart 1 of 4", True)
    new = await ledger.trainer.claim_job(job_id, "trainer-0", 600, "run-2")
    assert new is not None
    messages = [event.message for event in await newest_events(ledger, job_id)]
    assert "trainer-0 was restarted and continues at iteration 0" in messages
    assert "trainer-0 was killed" not in " ".join(finding.sentence for finding in await explain_job(ledger, job_id))
    with pytest.raises(LeaseLost):  # a message of the old run that comes late
        await ledger.trainer.renew_job(job_id, old, 600)
    assert await ledger.trainer.renew_job(job_id, new, 600) is JobState.RUNNING


async def test_end_of_one_run_leaves_the_lease_of_another(ledger: Ledger, world: World) -> None:
    job_id = await world.create_job()
    assert await ledger.trainer.claim_job(job_id, "trainer-0", 0.0, "run-1")
    assert await ledger.trainer.claim_job(job_id, "trainer-1", 600, "run-2")
    assert not await ledger.trainer.release_job(job_id, "run-1"), "it is the earlier owner"
    assert not await ledger.trainer.release_job(job_id, ""), "it is an owner without a supervisor"
    assert await ledger.trainer.claim_job(job_id, "trainer-2", 600, "run-3") is None
    assert await ledger.trainer.release_job(job_id, "run-2")
    assert await ledger.trainer.claim_job(job_id, "trainer-2", 600)
    assert not await ledger.trainer.release_job(job_id, "run-2"), "its epoch is over"


async def test_end_is_told_to_the_jobs_that_were_served(ledger: Ledger, world: World) -> None:
    pool = "ends"
    served, other = await world.create_job(pool=pool), await world.create_job(pool=pool)
    for job_id in (served, other):
        await world.start_training(job_id)
    await world.beat(pool, WorkerRecord(id="rollout-0", state="generating", job_id=served))
    await tell_end(ledger.redis, pool, end_of("rollout-0"))
    assert await ends_told_of(ledger, served) == ["process.ended rollout-0"]
    assert await ends_told_of(ledger, other) == []
    await tell_end(ledger.redis, pool, end_of("broker"))  # it serves them all
    assert (await ends_told_of(ledger, served))[0] == (await ends_told_of(ledger, other))[0] == "process.ended broker"


async def test_silence_is_told_once_and_not_after_an_end(ledger: Ledger, world: World) -> None:
    pool = "silence"
    job_id, _ = await world.started_job(pool=pool)
    await world.beat(pool, TrainerRecord(id="trainer-a", state="training", job_id=job_id), ago_s=11)
    await world.beat(pool, WorkerRecord(id="w1", state="generating", job_id=job_id), ago_s=9)
    await world.beat(pool, WorkerRecord(id="w2", state="generating", job_id=job_id), ago_s=11)
    await tell_end(ledger.redis, pool, end_of("w2"))
    for _ in range(2):
        await tell_silence(ledger)
    assert await ends_told_of(ledger, job_id) == ["process.silent trainer-a", "process.ended w2"]
    await world.beat(pool, TrainerRecord(id="trainer-a", state="training", job_id=job_id))  # it is back
    await tell_silence(ledger)
    assert len(await ends_told_of(ledger, job_id)) == 2


async def test_stack_tells_an_end_from_within_a_loop(
    ledger: Ledger, world: World, redis_url: str, tmp_path: Path
) -> None:
    options = StackOptions(tmp_path, pool="stack-ends")
    specs = {spec.name: spec for spec in service_specs(options, redis_url, 1)}
    trainer = specs["trainer"]
    assert trainer.run_variable.removeprefix("ONBEAT_").lower() in Settings.model_fields
    job_id = await world.create_job(pool=options.pool)
    assert await ledger.trainer.claim_job(job_id, trainer.process, 600, "run-1")
    end = ServiceEnd(trainer.process, "run-1", 1, "trainer-0 exited with code 1; restart 1 of 4")
    await asyncio.to_thread(tell_end_of_service, redis_url, replace(options, is_view=True), end)
    assert await ends_told_of(ledger, job_id) == [], "a view writes nothing"
    tell_end_of_service(redis_url, options, end)
    assert await ends_told_of(ledger, job_id) == ["process.ended trainer-0"]
    assert await ledger.trainer.claim_job(job_id, trainer.process, 600, "run-2")
