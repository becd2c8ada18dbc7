"""The control loop and the data process on a real Redis: once, in time, and never for ever."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from onbeat.config import JobConfig, ReasoningGymData
from onbeat.contracts.errors import StreamLost
from onbeat.contracts.records import Event, HostMemory, TrainerRecord, WorkerRecord
from onbeat.contracts.states import EvaluationState, IterationState, JobState, Verdict
from onbeat.machine.processor import Hardware
from onbeat.streams.codec import PromptTask
from onbeat.streams.connection import connect
from onbeat.streams.inspection import newest_events
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Claim, Ledger
from services.broker import prompts, watcher
from services.broker.conductor import MAX_CRASHES, Conductor
from services.broker.datasets import DatasetError, DatasetSpec
from services.broker.datasets.process import DatasetProcess
from services.broker.deadlines import num_lost_trainers
from services.broker.doctor.explain import explain_job
from services.broker.evaluations import Evaluator
from services.broker.tasks import produce_tasks
from services.broker.views.records import job_record
from services.trainer.__main__ import claim_next
from services.trainer.settings import Settings as TrainerSettings
from tests.broker_fixtures import broker_process, start_service, write_prompts
from tests.conftest import free_port, start_redis, unfinished
from tests.waiting import eventually, until
from tests.world import World, job_body, make_group, tasks_for

pytestmark = pytest.mark.slow

SEVERAL_LOOKS_S = 0.4


@pytest_asyncio.fixture
async def process(tmp_path: Path) -> AsyncIterator[DatasetProcess]:
    write_prompts(tmp_path)
    process = DatasetProcess(tmp_path, timeout_s=20, memory_mb=4096)
    yield process
    await process.close()


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are looked at often, so that nothing has happened after SEVERAL_LOOKS_S where nothing should."""
    monkeypatch.setattr(watcher, "WAIT_S", 0.1)
    monkeypatch.setattr(watcher, "PENDING_WAIT_S", 0.1)
    monkeypatch.setattr(watcher, "ARRIVAL_S", 0.2)


@pytest_asyncio.fixture
async def conductors(ledger: Ledger, process: DatasetProcess) -> AsyncIterator[None]:
    """Two of them: they must not get into each other's way in any test."""
    tasks = [asyncio.create_task(Conductor(ledger, process, timeout_s=10).run()) for _ in range(2)]
    yield
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes


async def reaches(ledger: Ledger, job_id: str, state: JobState) -> dict[str, str]:
    await eventually(f"job is {state}", lambda: ledger.jobs.state(job_id), state)
    return await ledger.jobs.fields(job_id)


# ---- opening -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("conductors")
async def test_whole_job_every_iteration_opened_exactly_once(ledger, world):
    job_id, epoch = await world.started_job()
    seen: list[str] = []
    for iteration in range(3):
        await world.wait_open(job_id, iteration)
        tasks = await world.drain(job_id)
        seen += [task.group_id for task in tasks]
        assert {task.policy_version for task in tasks} == {iteration}
        await world.commit(job_id, epoch, iteration)
    await asyncio.sleep(0.2)
    assert seen == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert await ledger.iterations.state(job_id, 3) is None  # the job has three
    assert await world.claim_all(job_id) == []
    opened = [event for event in await ledger.event_log.read(job_id) if event.kind == "iteration.opened"]
    assert [event.data["iteration"] for event in opened] == [0, 1, 2]
    await ledger.jobs.move(job_id, JobState.SUCCEEDED)


@pytest.mark.usefixtures("conductors")
async def test_opening_records_what_engine_and_trainer_share(ledger, world, pool):
    """Heartbeats say it, and the job keeps it when they are gone."""
    job_id, epoch = await world.started_job(pool=pool)
    await world.wait_open(job_id, 0)
    assert (await ledger.jobs.fields(job_id)).get("sharing") is None  # nobody has reported
    host = HostMemory(name="here", available_bytes=1, total_bytes=2)
    beat = {"job_id": job_id, "host": host, "devices": ["core 0"]}
    await world.beat(pool, WorkerRecord(id="w1", state="generating", **beat))
    await world.beat(pool, TrainerRecord(id="trainer-a", state="training", **beat))
    await world.drain(job_id)
    await world.commit(job_id, epoch, 0)
    await eventually("it is recorded", lambda: ledger.redis.hget(JobKeys(job_id).job, "sharing"))
    assert job_record(await ledger.jobs.fields(job_id)).sharing == "cores"


@pytest.mark.usefixtures("conductors")
async def test_paused_job_opens_its_next_iteration_when_it_is_resumed(ledger, world):
    job_id, epoch = await world.started_job()
    await world.wait_open(job_id, 0)
    await world.drain(job_id)
    await ledger.jobs.move(job_id, JobState.PAUSED)
    await world.commit(job_id, epoch, 0)
    await asyncio.sleep(0.3)
    assert await ledger.iterations.state(job_id, 1) is None
    await ledger.jobs.move(job_id, JobState.RUNNING)
    await world.wait_open(job_id, 1)


# ---- opening ahead -----------------------------------------------------------------------------------------------


async def wait_claimable(ledger: Ledger, job_id: str) -> list[Claim]:
    """Wait for groups that are free to claim, and return their claims."""
    claims: list[Claim] = await eventually("prompts", lambda: World(ledger).claim_all(job_id))
    return claims


@pytest.mark.usefixtures("conductors")
async def test_bounded_job_opens_ahead_as_far_as_the_bound_allows(ledger, world):
    job_id, epoch = await world.started_job(schedule={"mode": "bounded", "max_staleness": 2, "num_iterations": 6})
    await world.wait_open(job_id, 0)
    await asyncio.sleep(0.2)
    assert await ledger.iterations.state(job_id, 1) is None  # rollouts have prompts to claim: a newer version may come
    for iteration in (0, 1, 2):
        claims = await wait_claimable(ledger, job_id)
        assert {(claim.task.iteration, claim.task.policy_version) for claim in claims} == {(iteration, 0)}
        await world.submit_groups(job_id, claims)
    await asyncio.sleep(0.2)
    assert await ledger.iterations.state(job_id, 3) is None  # the bound
    for iteration in range(3):
        await world.commit(job_id, epoch, iteration)
        claims = await wait_claimable(ledger, job_id)
        versions = {(claim.task.iteration, claim.task.policy_version) for claim in claims}
        assert versions == {(iteration + 3, iteration + 1)}
        await world.submit_groups(job_id, claims)
    for iteration in (3, 4, 5):
        await world.commit(job_id, epoch, iteration)
    assert (await ledger.jobs.fields(job_id))["num_opened"] == "6"
    await ledger.jobs.move(job_id, JobState.SUCCEEDED)


@pytest.mark.usefixtures("conductors")
async def test_last_claim_opens_the_next_iteration_at_once(world, monkeypatch):
    job_id, _ = await world.started_job(schedule={"mode": "bounded", "max_staleness": 1})
    await world.wait_open(job_id, 0)
    monkeypatch.setattr(watcher, "WAIT_S", 20.0)
    await asyncio.sleep(1.2)  # the watcher waits for an event, and now for as long as that
    await world.claim_all(job_id)
    await world.wait_open(job_id, 1)  # this waits for half as long


@pytest.mark.usefixtures("conductors", "eager")
async def test_iteration_that_waits_for_an_unpublished_version_says_so(ledger, world):
    schedule = {"mode": "bounded", "max_staleness": 1, "iteration_deadline_s": 1.0}
    job_id, _ = await world.started_job(pool="mute", schedule=schedule)
    for _ in range(2):
        await world.submit_groups(job_id, await wait_claimable(ledger, job_id))
    await ledger.redis.hset(f"onbeat:{{{job_id}}}:job", "next_iteration", 2)  # a trainer that published neither
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert "not open: it needs policy version 1, and trainer trainer-a has published 0" in fields["error"]


# ---- evaluation --------------------------------------------------------------------------------------------------

HELD_OUT = {"data": {"type": "jsonl", "path": "held_out.jsonl"}, "num_prompts": 3, "every_iterations": 2}


def write_held_out(folder: Path) -> None:
    rows = [json.dumps({"prompt": f"held out {i}", "answer": str(i)}) for i in range(5)]
    (folder / "held_out.jsonl").write_text("\n".join(rows))


async def is_over(ledger: Ledger, job_id: str, evaluation: int) -> EvaluationState:
    async def ended() -> EvaluationState | None:
        state = await ledger.evaluations.state(job_id, evaluation)
        return state if state and state.is_over else None

    state: EvaluationState = await eventually(f"evaluation {evaluation} has ended", ended)
    return state


@pytest.mark.usefixtures("conductors")
async def test_held_out_set_is_evaluated_on_schedule_and_never_trained(ledger, world, tmp_path):
    write_held_out(tmp_path)
    job_id, epoch = await world.started_job(evaluation=HELD_OUT)
    tasks: list[PromptTask] = []
    for iteration in range(3):
        state = partial(ledger.iterations.state, job_id, iteration)
        tasks += await world.drain_until(job_id, state, IterationState.DRAINED)
        if iteration != 1:
            tasks += await world.drain_evaluation(job_id, iteration)
        await world.commit(job_id, epoch, iteration)
    tasks += await world.drain_evaluation(job_id, 3)
    evaluated = [task for task in tasks if task.is_evaluation]
    assert [task.group_id for task in evaluated] == [f"eval-{e}-{i}" for e in (0, 2, 3) for i in range(3)]
    assert [task.policy_version for task in evaluated] == [e for e in (0, 2, 3) for _ in range(3)]
    assert {task.messages[-1].content for task in evaluated} == {"held out 0", "held out 1", "held out 2"}
    trained = await ledger.trainer.take(job_id, "rank-0", 100, 0.01)
    assert [group.group_id for group in trained] == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    for iteration in range(3):
        assert not any(group.is_evaluation for group in await ledger.iterations.accepted_groups(job_id, iteration))
    assert await ledger.evaluations.state(job_id, 1) is None
    fields = await ledger.evaluations.fields(job_id, 2)
    assert json.loads(fields["scores"])["reward_mean"] == 0.5
    assert await ledger.evaluations.groups(job_id, 2) == []  # scored, dropped
    done = [event for event in await ledger.event_log.read(job_id) if event.kind == "evaluation.done"]
    assert [(event.data["evaluation"], event.data["policy_version"]) for event in done] == [(0, 0), (2, 2), (3, 3)]
    kinds = [event.kind for event in await ledger.event_log.read(job_id) if event.kind.endswith(".opened")]
    assert kinds[:2] == ["iteration.opened", "evaluation.opened"]  # training's prompts go first
    await ledger.jobs.move(job_id, JobState.SUCCEEDED)


@pytest.mark.usefixtures("conductors")
async def test_evaluation_survives_a_dead_worker_on_its_own_version(ledger, world, tmp_path):
    write_held_out(tmp_path)
    job_id, epoch = await world.started_job(evaluation=HELD_OUT)
    await eventually("both are open", lambda: ledger.rollout.num_unclaimed_prompts(job_id), 5)
    trained = await ledger.rollout.claim(job_id, "w1", 2, lease_s=30)
    await world.submit_groups(job_id, trained)
    lost = await ledger.rollout.claim(job_id, "dead", 3, lease_s=0.3)
    assert {claim.task.is_evaluation for claim in lost} == {True}
    await world.commit(job_id, epoch, 0)
    await world.wait_open(job_id, 1)  # training does not wait for it
    await asyncio.sleep(0.3)
    claims = await ledger.rollout.claim(job_id, "w2", 10, lease_s=0.3)
    again = [claim for claim in claims if claim.task.is_evaluation]
    assert [claim.entry_id for claim in again] == [claim.entry_id for claim in lost]
    newer = make_group(again[0].task, "w2", version=1)
    assert await ledger.rollout.submit(job_id, again[0].entry_id, newer) is Verdict.STALE
    await world.submit_groups(job_id, again, "w2")
    late = make_group(lost[0].task, "dead")
    assert await ledger.rollout.submit(job_id, lost[0].entry_id, late) in (Verdict.DUPLICATE, Verdict.CLOSED)
    assert await is_over(ledger, job_id, 0) is EvaluationState.DONE
    assert (await ledger.evaluations.fields(job_id, 0))["num_accepted"] == "3"


@pytest.mark.usefixtures("conductors")
async def test_evaluation_without_data_is_an_event_and_the_job_goes_on(ledger, world):
    job_id, _ = await world.started_job(evaluation=HELD_OUT)  # nobody has written the file
    assert await is_over(ledger, job_id, 0) is EvaluationState.FAILED
    (event,) = [event for event in await ledger.event_log.read(job_id) if event.kind == "evaluation.failed"]
    assert event.message.startswith("no prompts: evaluation.data.path: there is no file held_out.jsonl")
    assert await ledger.jobs.state(job_id) is JobState.RUNNING
    assert (await ledger.jobs.fields(job_id))["next_evaluation"] == "2"


async def test_broker_without_the_file_fails_no_open_evaluation(ledger, world, process, tmp_path):
    write_held_out(tmp_path)
    (tmp_path / "empty").mkdir()
    process_without = DatasetProcess(tmp_path / "empty", timeout_s=20, memory_mb=4096)
    job_id, _ = await world.started_job(evaluation=HELD_OUT)
    assert await ledger.iterations.open(job_id, 0, 0, tasks_for(0)) == ""
    fields = await ledger.jobs.fields(job_id)  # as both brokers saw them
    for data_process in (process, process_without):
        evaluator = Evaluator(ledger, data_process, job_id)
        evaluator.prepare(config := JobConfig.of_job(fields))
        assert evaluator._reading is not None
        await asyncio.wait({evaluator._reading})
        await evaluator.step(config, fields)
        assert await ledger.evaluations.state(job_id, 0) is EvaluationState.OPEN
    assert (await ledger.jobs.fields(job_id))["next_evaluation"] == "2"
    await process_without.close()


@pytest.mark.usefixtures("conductors", "eager")
async def test_stuck_evaluation_is_given_up_before_the_job_is(ledger, world, tmp_path):
    write_held_out(tmp_path)
    schedule = {"num_iterations": 1, "iteration_deadline_s": 1.0}
    job_id, epoch = await world.started_job(evaluation=HELD_OUT, schedule=schedule)
    await world.submit_groups(job_id, (await wait_claimable(ledger, job_id))[:2])
    await world.commit(job_id, epoch, 0)
    assert [await is_over(ledger, job_id, e) for e in (0, 1)] == [EvaluationState.FAILED] * 2
    assert "given up, no progress for 1 s: 0 of 3 groups" in (await ledger.evaluations.fields(job_id, 1))["message"]
    assert await ledger.jobs.state(job_id) is JobState.RUNNING  # the trainer can still end it
    assert await world.claim_all(job_id, "w2") == []  # nobody generates for nothing
    assert await ledger.rollout.num_unclaimed_prompts(job_id) == 0
    await asyncio.sleep(1.5)  # the trainer writes the last checkpoint meanwhile
    assert await ledger.jobs.state(job_id) is JobState.RUNNING
    await ledger.redis.hset(JobKeys(job_id).job, "lease_until", 0)
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert "trainer-a has not finished the job" in fields["error"]


# ---- ending ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("conductors", "eager")
async def test_job_without_progress_fails_and_says_what_it_waited_for(ledger, world):
    job_id = await world.create_job(pool="stuck", schedule={"iteration_deadline_s": 0.6})
    await world.beat("stuck", WorkerRecord(id="w1", state="generating", lease_s=90), ago_s=60)
    await world.start_training(job_id)
    await world.wait_open(job_id, 0)
    claim, _ = await world.claim_all(job_id)
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert "iteration 0 made no progress for" in fields["error"]
    assert "w1 was last seen 6" in fields["error"]
    assert "others take over its 2 prompts in 8" in fields["error"]
    assert "iteration 0 (policy version 0): 0 of 2 groups accepted; 2 with w1 (" in fields["error"]
    assert "the job fails in" not in fields["error"]  # it does now
    assert claim.task.group_id == "0-0"


@pytest.mark.usefixtures("conductors", "eager")
async def test_paused_and_pending_jobs_may_wait(ledger, world):
    pending = await world.create_job(schedule={"iteration_deadline_s": 0.2})
    paused = await world.create_job(schedule={"iteration_deadline_s": 0.2})
    await ledger.jobs.move(paused, JobState.RUNNING)
    await ledger.jobs.move(paused, JobState.PAUSED)
    await asyncio.sleep(SEVERAL_LOOKS_S)
    assert await ledger.jobs.state(pending) is JobState.PENDING
    assert await ledger.jobs.state(paused) is JobState.PAUSED


async def trainer_seen(ledger: Ledger, pool: str, ago_s: float) -> None:
    await World(ledger).beat(pool, TrainerRecord(id="trainer-a", state="training", job_id="another"), ago_s)


@pytest.mark.usefixtures("conductors", "eager")
async def test_job_that_lost_its_trainer_may_wait_for_a_busy_one(ledger, world, pool):
    await trainer_seen(ledger, pool, ago_s=0)
    job_id, _ = await world.started_job(pool=pool, schedule={"iteration_deadline_s": 0.2})
    await ledger.redis.hset(JobKeys(job_id).job, "lease_until", 0)
    await asyncio.sleep(3.0)  # several looks, and more than the deadline
    assert await ledger.jobs.state(job_id) is JobState.RUNNING
    await trainer_seen(ledger, pool, ago_s=600)
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert "made no progress for" in fields["error"]


@pytest.mark.usefixtures("conductors", "eager")
async def test_pending_job_fails_when_its_pool_lacks_trainers_too_long(ledger, world, pool):
    await trainer_seen(ledger, pool, ago_s=0)
    job_id = await world.create_job(pool=pool, schedule={"start_deadline_s": 100.0})
    await ledger.redis.hset(JobKeys(job_id).job, "created_at", await ledger.now() - 1000)
    await asyncio.sleep(SEVERAL_LOOKS_S)
    assert await ledger.jobs.state(job_id) is JobState.PENDING  # it waits for its turn, which may take long
    await trainer_seen(ledger, pool, ago_s=600)
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert fields["error"].startswith("no trainer came for 60")
    assert "(the last one, trainer-a, was last seen 60" in fields["error"]
    assert "start one: `onbeat up`, or `python -m services.trainer` with ONBEAT_POOL=" + pool in fields["error"]


@pytest.mark.usefixtures("conductors")
async def test_pending_job_waits_for_trainers_that_start_as_well(ledger, world, pool):
    job_id = await world.create_job(pool=pool, schedule={"start_deadline_s": 100.0})
    await ledger.redis.hset(JobKeys(job_id).job, "created_at", await ledger.now() - 1000)  # all services were down
    await asyncio.sleep(SEVERAL_LOOKS_S)
    assert await ledger.jobs.state(job_id) is JobState.PENDING


@pytest.mark.usefixtures("conductors", "eager")
async def test_pending_job_fails_at_a_start_deadline_that_is_short(ledger, world, pool, monkeypatch):
    monkeypatch.setattr(watcher, "ARRIVAL_S", 60.0)
    job_id = await world.create_job(pool=pool, schedule={"start_deadline_s": 0.5})
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert fields["error"].startswith("no trainer came for ")


@pytest.mark.usefixtures("conductors", "eager")
async def test_job_that_kills_its_trainers_is_not_handed_on_for_ever(ledger, world):
    job_id = await world.create_job(schedule={"max_lost_trainers": 2})
    for owner in ("trainer-a", "trainer-b"):  # one loss, and a commit
        epoch = await ledger.trainer.claim_job(job_id, owner, 0.0)
        assert epoch is not None
    await ledger.versions.announce(job_id, epoch, 0, "127.0.0.1:1", "d0")
    await world.train(job_id, epoch, range(1))
    assert await ledger.trainer.claim_job(job_id, "trainer-c", 0.0)  # the first loss since
    await world.wait_open(job_id, 1)
    await asyncio.sleep(SEVERAL_LOOKS_S)
    assert await ledger.jobs.state(job_id) is JobState.RUNNING
    assert await ledger.trainer.claim_job(job_id, "trainer-d", 30.0)
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert fields["error"].startswith("2 trainers in a row were lost (schedule.max_lost_trainers); ")
    assert "2 trainers in a row ended without committing iteration 1" in fields["error"]
    assert "trainer-d holds" in fields["error"]


def test_handover_hides_no_earlier_loss():
    kinds = ["job.taken_over", "job.handed_over", "job.taken_over", "job.handed_over"]  # nobody has come yet
    events = [Event(id=f"{index}-0", time=0.0, kind=kind, message="", data={}) for index, kind in enumerate(kinds)]
    assert num_lost_trainers(events[::-1]) == 1


@pytest.mark.usefixtures("conductors", "eager")
async def test_trainers_that_hand_their_job_over_are_not_lost(ledger, world):
    job_id = await world.create_job(schedule={"max_lost_trainers": 2})
    for owner in ("trainer-a", "trainer-b", "trainer-c", "trainer-d"):
        epoch = await ledger.trainer.claim_job(job_id, owner, 30.0)
        assert epoch is not None
        await ledger.trainer.give_back(job_id, epoch, is_handover=True)
    assert await ledger.trainer.claim_job(job_id, "trainer-e", 0.0)
    assert await ledger.trainer.claim_job(job_id, "trainer-f", 0.0)  # one loss
    await asyncio.sleep(SEVERAL_LOOKS_S)
    assert await ledger.jobs.state(job_id) is JobState.RUNNING
    assert num_lost_trainers(await newest_events(ledger, job_id)) == 1
    epoch = await ledger.trainer.claim_job(job_id, "trainer-g", 30.0)  # the second one
    await reaches(ledger, job_id, JobState.FAILED)
    await ledger.trainer.give_back(job_id, str(epoch), is_handover=True)  # too late: it leaves nothing to anybody
    kinds = [event.kind for event in await ledger.event_log.read(job_id)]
    assert kinds.count("job.handed_over") == 4


async def test_crashes_of_a_watcher_long_ago_do_not_add_up(ledger, world, process, monkeypatch):
    job_id = await world.create_job()
    conductor = Conductor(ledger, process, timeout_s=10)
    for _ in range(MAX_CRASHES - 1):
        await conductor._bury_after_crashes(job_id, RuntimeError("a defect"))
    monkeypatch.setattr("services.broker.conductor.CRASH_WINDOW_S", 0.0)  # all crashes are long ago now
    await conductor._bury_after_crashes(job_id, RuntimeError("a defect"))
    assert await ledger.jobs.state(job_id) is JobState.PENDING
    monkeypatch.undo()
    for _ in range(MAX_CRASHES - 1):
        await conductor._bury_after_crashes(job_id, RuntimeError("a defect"))
    assert "the broker cannot conduct this job: RuntimeError: a defect" in (await ledger.jobs.fields(job_id))["error"]


@pytest.mark.usefixtures("conductors", "eager")
async def test_time_that_no_broker_watched_fails_no_job(ledger, world):
    job_id, _ = await world.started_job(schedule={"iteration_deadline_s": 4.0})
    await world.wait_open(job_id, 0)
    await ledger.redis.hset(JobKeys(job_id).job, "progress_at", time.time() - 100_000)  # all services were down
    await asyncio.sleep(SEVERAL_LOOKS_S)
    assert await ledger.jobs.state(job_id) is JobState.RUNNING
    error = (await reaches(ledger, job_id, JobState.FAILED))["error"]
    assert ("made no progress for" in error, "for 100000 s" in error) == (True, False)


@pytest.mark.usefixtures("conductors")
async def test_cancelled_job_without_a_trainer_is_ended(ledger, world):
    job_id = await world.create_job()
    await world.start_training(job_id, lease_s=0.5)
    await ledger.jobs.move(job_id, JobState.CANCELLING)
    fields = await reaches(ledger, job_id, JobState.CANCELLED)
    assert float(fields["finished_at"]) >= float(fields["lease_until"])


@pytest.mark.usefixtures("conductors")
async def test_final_job_is_taken_off_the_active_list(ledger, world):
    job_id = await world.create_job()
    await ledger.jobs.move(job_id, JobState.CANCELLED)
    await ledger.redis.zadd("onbeat:active", {job_id: 1.0})  # the mover died half way

    async def is_retired():
        return job_id not in await unfinished(ledger)

    await eventually("retired", is_retired)


@pytest.mark.usefixtures("conductors")
async def test_data_that_vanishes_fails_the_job_with_the_reason(ledger, world, tmp_path, monkeypatch):
    prepared: list[int] = []

    async def produce(config, iteration, process):
        tasks = await produce_tasks(config, iteration, process)
        prepared.append(iteration)
        return tasks

    monkeypatch.setattr(prompts, "produce_tasks", produce)
    job_id, epoch = await world.started_job(rollout={"num_prompts_per_iteration": 5})
    await world.wait_open(job_id, 0)
    await eventually("both conductors have prepared iteration 1", lambda: prepared.count(1) == 2)
    (tmp_path / "prompts.jsonl").unlink()
    await world.train(job_id, epoch, range(2))
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert fields["error"].startswith("iteration 2 has no prompts: data.path: there is no file prompts.jsonl")


@pytest.mark.usefixtures("conductors", "eager")
async def test_job_of_a_later_version_is_left_to_its_own_broker(ledger, world, pool, caplog):
    hardware = Hardware("a test's processor", "", "native")
    good = await world.create_job()
    config = JobConfig.model_validate(job_body(pool=pool)).model_dump(mode="json") | {"of_a_later_version": 1}
    later = f"{good}-later"
    await ledger.jobs.create(later, config, 3, 0)
    assert await claim_next(TrainerSettings(pool=pool), ledger, hardware) is None
    await world.start_training(good)
    await world.wait_open(good, 0)
    await asyncio.sleep(SEVERAL_LOOKS_S)
    assert await ledger.jobs.state(later) is JobState.PENDING
    said = [line.getMessage() for line in caplog.records if f"job {later} is left to" in line.getMessage()]
    assert sum("brokers of another version" in line for line in said) == 2  # once by each of them
    (finding, *_) = await explain_job(ledger, later)
    assert "does not understand the configuration" in finding.sentence


async def test_refused_command_of_one_job_does_not_end_the_broker(ledger, world, process):
    """Nor does a Redis that is full. One that is away does."""
    job_id, _ = await world.started_job()
    await ledger.redis.set(JobKeys(job_id).events, "no stream")
    conductor = asyncio.create_task(Conductor(ledger, process, timeout_s=0.3).run())
    await asyncio.sleep(2.0)
    assert not conductor.done()
    conductor.cancel()
    away = Ledger(connect(f"redis://127.0.0.1:{free_port()}", retry_s=1))
    with pytest.raises(RedisConnectionError):
        await asyncio.wait_for(Conductor(away, process, timeout_s=0.3).run(), 20)


@pytest.mark.usefixtures("conductors")
@pytest.mark.parametrize(
    "odd",
    [{"x": "y"}, {"kind": b"\xff", "message": "", "data": "{}", "time": "1"}, {"kind": "a", "data": "[1", "time": "x"}],
    ids=["other fields", "no text", "no JSON"],
)
async def test_unreadable_event_is_shown_as_one_and_the_job_goes_on(ledger, world, odd):
    job_id, epoch = await world.started_job()
    for iteration in range(3):
        entry = await ledger.redis.xadd(JobKeys(job_id).events, odd)
        await world.wait_open(job_id, iteration)
        await world.drain(job_id)
        await world.commit(job_id, epoch, iteration)
    unreadable = [event for event in await ledger.event_log.read(job_id) if event.kind == "event.unreadable"]
    assert len(unreadable) == 3
    assert unreadable[-1].id == entry.decode()
    assert abs(unreadable[-1].time - time.time()) < 60
    assert await ledger.event_log.read(job_id, after=(await ledger.event_log.read(job_id))[-1].id) == []


@pytest.mark.usefixtures("conductors", "eager")
@pytest.mark.parametrize("name", ["prompts", "rollouts"])
async def test_lost_stream_fails_its_job_by_name_and_no_other(ledger, world, name):
    job_id, other = await world.create_job(), await world.create_job()
    for started_id in (job_id, other):
        await world.start_training(started_id)
        await world.wait_open(started_id, 0)
    await ledger.redis.delete(getattr(JobKeys(job_id), name))
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert fields["error"].startswith(f"the stream {name} of job {job_id} is gone from Redis")
    await asyncio.sleep(SEVERAL_LOOKS_S)
    assert await ledger.jobs.state(other) is JobState.RUNNING


async def test_trainer_that_finds_no_stream_fails_the_job_by_name(ledger, world):
    job_id, _ = await world.started_job()
    await ledger.redis.delete(JobKeys(job_id).rollouts)
    with pytest.raises(StreamLost, match=f"the stream rollouts of job {job_id} is gone"):
        await ledger.trainer.take(job_id, "trainer-a", 1, 0.1)


# ---- the data process --------------------------------------------------------------------------------------------


def file_spec() -> DatasetSpec:
    return DatasetSpec.of_job(JobConfig.model_validate(job_body()))


def endless_spec() -> DatasetSpec:
    data = ReasoningGymData(task="chain_sum", options={"min_terms": 10**9, "max_terms": 10**9})
    return DatasetSpec(data=data, seed=0, num_items=1)


async def test_data_process_serves_again_after_a_hang_and_a_crash(tmp_path):
    write_prompts(tmp_path)
    process = DatasetProcess(tmp_path, timeout_s=1.0, memory_mb=1024)
    assert len((await process.read(file_spec(), 0, 3))[0]) == 3
    with pytest.raises(DatasetError, match=r"longer than 1 s|more than 1024 MB"):
        await process.read(endless_spec(), 0, 1)
    assert len((await process.read(file_spec(), 3, 2))[0]) == 2
    assert process._child
    await process._child.kill()
    assert len((await process.read(file_spec(), 5, 1))[0]) == 1
    await process.close()


async def test_data_process_keeps_a_lower_limit_of_its_machine(tmp_path):
    """Batch systems limit the address space; the limit of the job's data may only be lower."""
    command = [
        "sh",
        "-c",
        'ulimit -v 3000000 && exec "$@"',
        "sh",
        sys.executable,
        "-m",
        "services.broker.datasets.child",
    ]
    request = b'{"pattern": "[0-4]", "timeout_s": 20}\n'
    child = await asyncio.create_subprocess_exec(
        *command, str(tmp_path), "8192", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    answer, _ = await child.communicate(request)
    assert json.loads(answer) == {"problem": "", "num_groups": 0}


async def test_killed_data_process_is_named_and_not_its_data(process):
    reading = asyncio.create_task(process.read(endless_spec(), 0, 1))
    await until(lambda: process._child is not None)
    os.kill(process._child.pid, signal.SIGKILL)
    with pytest.raises(DatasetError, match="SIGKILL ended the process that reads it; if it was for want of memory"):
        await reading


async def test_idle_data_process_ends_and_starts_again(tmp_path):
    """It ends as it does when its broker is gone: its standard input ends."""
    write_prompts(tmp_path)
    process = DatasetProcess(tmp_path, timeout_s=20, memory_mb=4096, idle_s=0.2)
    await process.read(file_spec(), 0, 3)
    assert (first := process._child)
    assert await asyncio.wait_for(first._process.wait(), 10) == 0
    assert len((await process.read(file_spec(), 3, 2))[0]) == 2
    await process.close()


async def test_cancelled_request_does_not_answer_the_next_one(process):
    spec = file_spec()
    await process.read(spec, 0, 1)
    abandoned = asyncio.create_task(process.read(spec, 0, 4))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    assert len((await process.read(spec, 0, 2))[0]) == 2


# ---- the process -------------------------------------------------------------------------------------------------


def log_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


async def test_broker_survives_a_redis_restart_and_stops_with_zero(tmp_path):
    redis_url = f"redis://127.0.0.1:{(redis_port := free_port())}"
    redis = start_redis(redis_port, str(tmp_path))
    try:
        with broker_process(tmp_path, redis_url, LOG_FORMAT="json") as (url, broker):
            async with httpx.AsyncClient(base_url=url, trust_env=False) as client:

                async def is_ready():
                    return (await client.get("/readyz")).status_code == 200

                redis.terminate()
                redis.wait(10)
                assert not await is_ready()
                assert (await client.get("/livez")).status_code == 200
                redis = start_redis(redis_port, str(tmp_path))
                await eventually("ready again", is_ready)
                ledger = Ledger(connect(redis_url))
                job_id = await World(ledger).create_job()
                waiting = asyncio.create_task(client.get(f"/v1/jobs/{job_id}/stream"))
                await asyncio.sleep(0.2)
                broker.send_signal(signal.SIGTERM)
                assert '"stopping"' in (await waiting).text  # a stream does not hold up the end
                await ledger.redis.aclose()
            assert await asyncio.to_thread(broker.wait, 10) == 0
        assert log_of(tmp_path)[0]["message"].startswith("serving http://127.0.0.1")
    finally:
        redis.terminate()
        redis.wait(10)


async def test_broker_without_redis_says_so_and_exits_non_zero(tmp_path):
    url = f"127.0.0.1:{free_port()}"
    broker = start_service("broker", tmp_path, REDIS_URL=f"redis://{url}", REDIS_RETRY_S="1", LOG_FORMAT="json")
    assert await asyncio.to_thread(broker.wait, 20) == 1
    last = log_of(tmp_path)[-1]
    assert last["level"] == "CRITICAL"
    assert f"no Redis at {url}" in last["message"]
    assert "set ONBEAT_REDIS_URL" in last["message"]


async def test_broker_gives_up_a_redis_that_hangs_up_in_time(tmp_path):
    """One that accepts connections, as while it loads its data: each try of the client library would try again."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    url = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    broker = start_service("broker", tmp_path, REDIS_URL=f"redis://{url}", REDIS_RETRY_S="8", LOG_FORMAT="json")
    assert await asyncio.to_thread(broker.wait, 30) == 1
    assert f"waiting for Redis at {url}" in log_of(tmp_path)[0]["message"]
    assert f"no Redis at {url}" in log_of(tmp_path)[-1]["message"]
    server.close()


async def test_broker_that_lost_redis_for_good_exits_non_zero(tmp_path):
    redis = start_redis(redis_port := free_port(), str(tmp_path))
    try:
        with broker_process(tmp_path, f"redis://127.0.0.1:{redis_port}", REDIS_RETRY_S="1") as (_, broker):
            redis.terminate()
            redis.wait(10)
            assert await asyncio.to_thread(broker.wait, 30) == 1
        assert "the control loop gave up" in (tmp_path / "log").read_text()
    finally:
        redis.kill()
