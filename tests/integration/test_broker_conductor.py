"""The control loop and the data process on a real Redis: once, in time, and never for ever."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from onbeat.config import JobConfig, ReasoningGymData
from onbeat.streams.ledger import Ledger, connect
from onbeat.types import JobState, WorkerRecord
from services.broker.conductor import Conductor
from services.broker.datasets import DatasetError, DatasetSpec
from services.broker.datasets.process import DatasetProcess
from tests.conftest import free_port, start_redis
from tests.integration.broker_fixtures import (
    claim_all,
    commit,
    create_job,
    drain,
    eventually,
    job_body,
    start_training,
    wait_open,
    write_prompts,
)


@pytest_asyncio.fixture
async def process(tmp_path: Path) -> AsyncIterator[DatasetProcess]:
    write_prompts(tmp_path)
    process = DatasetProcess(tmp_path, timeout_s=20, memory_mb=4096)
    yield process
    await process.close()


@pytest_asyncio.fixture
async def conductors(ledger: Ledger, process: DatasetProcess) -> AsyncIterator[None]:
    """Two of them: they must not get into each other's way in any test."""
    tasks = [asyncio.create_task(Conductor(ledger, process, patience_s=10).run()) for _ in range(2)]
    yield
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes


async def reaches(ledger: Ledger, job_id: str, state: JobState) -> dict[str, str]:
    async def has_state() -> bool:
        return await ledger.job_state(job_id) is state

    await eventually(f"job is {state}", has_state)
    return await ledger.job_fields(job_id)


# ---- opening -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("conductors")
async def test_whole_job_every_iteration_opened_exactly_once(ledger: Ledger) -> None:
    job_id = await create_job(ledger)
    epoch = await start_training(ledger, job_id)
    seen: list[str] = []
    for iteration in range(3):
        await wait_open(ledger, job_id, iteration)
        tasks = await drain(ledger, job_id)
        seen += [task.group_id for task in tasks]
        assert {task.policy_version for task in tasks} == {iteration}
        await commit(ledger, job_id, epoch, iteration)
    await asyncio.sleep(0.2)
    assert seen == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert await ledger.iteration_state(job_id, 3) is None  # the job has three
    assert await claim_all(ledger, job_id) == []
    opened = [event for event in await ledger.events(job_id) if event.kind == "iteration.opened"]
    assert [event.data["iteration"] for event in opened] == [0, 1, 2]
    await ledger.move_job(job_id, JobState.SUCCEEDED)


@pytest.mark.usefixtures("conductors")
async def test_nothing_opens_before_a_version_is_published(ledger: Ledger) -> None:
    job_id = await create_job(ledger)
    epoch = await ledger.claim_job(job_id, "trainer-a", 30)
    assert epoch
    await asyncio.sleep(0.4)
    assert await ledger.iteration_state(job_id, 0) is None
    await ledger.announce_version(job_id, epoch, 0, "127.0.0.1:1", "d0")
    await wait_open(ledger, job_id, 0)


@pytest.mark.usefixtures("conductors")
async def test_paused_job_opens_its_next_iteration_when_it_is_resumed(ledger: Ledger) -> None:
    job_id = await create_job(ledger)
    epoch = await start_training(ledger, job_id)
    await wait_open(ledger, job_id, 0)
    await drain(ledger, job_id)
    await ledger.move_job(job_id, JobState.PAUSED)
    await commit(ledger, job_id, epoch, 0)
    await asyncio.sleep(0.3)
    assert await ledger.iteration_state(job_id, 1) is None
    await ledger.move_job(job_id, JobState.RUNNING)
    await wait_open(ledger, job_id, 1)


async def test_prompts_are_the_same_whichever_broker_opens(ledger: Ledger, process: DatasetProcess) -> None:
    """One job is conducted by one broker, its twin by another for each iteration."""
    dispatched: list[list[bytes]] = []
    for brokers_per_job in (1, 3):
        job_id = await create_job(ledger, seed=7)
        epoch = await start_training(ledger, job_id)
        payloads: list[bytes] = []
        conductor: asyncio.Task[None] | None = None
        for iteration in range(3):
            if conductor is None or brokers_per_job > 1:
                if conductor:
                    conductor.cancel()
                conductor = asyncio.create_task(Conductor(ledger, process, patience_s=10).run())
            await wait_open(ledger, job_id, iteration)
            payloads += [task.SerializeToString(deterministic=True) for task in await drain(ledger, job_id)]
            await commit(ledger, job_id, epoch, iteration)
        assert conductor
        conductor.cancel()
        await asyncio.gather(conductor, return_exceptions=True)
        dispatched.append(payloads)
    assert len(dispatched[0]) == 6
    assert dispatched[0] == dispatched[1]


# ---- ending ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("conductors")
async def test_job_without_progress_fails_and_says_what_it_waited_for(ledger: Ledger) -> None:
    job_id = await create_job(ledger, pool="stuck", schedule={"iteration_deadline_s": 0.6})
    await ledger.heartbeat("stuck", WorkerRecord(id="w-lazy", state="generating", last_seen_at=time.time() - 60))
    await start_training(ledger, job_id)
    await wait_open(ledger, job_id, 0)
    claim, _ = await claim_all(ledger, job_id)
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert "iteration 0 made no progress for" in fields["error"]
    assert "0 of 2 groups accepted; workers seen: w-lazy (generating, 6" in fields["error"]
    assert claim.task.group_id == "0-0"


@pytest.mark.usefixtures("conductors")
async def test_job_whose_trainer_publishes_nothing_fails_and_names_the_trainer(ledger: Ledger) -> None:
    job_id = await create_job(ledger, pool="empty", schedule={"iteration_deadline_s": 0.3})
    await ledger.claim_job(job_id, "trainer-mute", 30)
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert "policy version 0 was not published by trainer trainer-mute" in fields["error"]
    assert "none in pool empty; start a rollout" in fields["error"]


@pytest.mark.usefixtures("conductors")
async def test_paused_and_pending_jobs_may_wait(ledger: Ledger) -> None:
    pending = await create_job(ledger, schedule={"iteration_deadline_s": 0.2})
    paused = await create_job(ledger, schedule={"iteration_deadline_s": 0.2})
    await ledger.move_job(paused, JobState.RUNNING)
    await ledger.move_job(paused, JobState.PAUSED)
    await asyncio.sleep(1.5)
    assert await ledger.job_state(pending) is JobState.PENDING
    assert await ledger.job_state(paused) is JobState.PAUSED


@pytest.mark.usefixtures("conductors")
async def test_long_outage_of_the_brokers_fails_no_job_that_they_held_up(ledger: Ledger) -> None:
    job_id = await create_job(ledger, schedule={"iteration_deadline_s": 1.0})
    await start_training(ledger, job_id)
    await ledger.redis.hset(f"onbeat:{{{job_id}}}:job", "progress_at", time.time() - 1000)
    await wait_open(ledger, job_id, 0)
    assert await ledger.job_state(job_id) is JobState.RUNNING


@pytest.mark.usefixtures("conductors")
async def test_cancelled_job_without_a_trainer_is_ended(ledger: Ledger) -> None:
    job_id = await create_job(ledger)
    await start_training(ledger, job_id, lease_s=0.5)
    await ledger.move_job(job_id, JobState.CANCELLING)
    fields = await reaches(ledger, job_id, JobState.CANCELLED)
    assert float(fields["finished_at"]) >= float(fields["lease_until"])


@pytest.mark.usefixtures("conductors")
async def test_final_job_is_taken_off_the_active_list(ledger: Ledger) -> None:
    job_id = await create_job(ledger)
    await ledger.move_job(job_id, JobState.CANCELLED)
    await ledger.redis.zadd("onbeat:active", {job_id: 1.0})  # its mover died half way

    async def is_retired() -> bool:
        return job_id not in await ledger.job_ids(active_only=True)

    await eventually("retired", is_retired)


@pytest.mark.usefixtures("conductors")
async def test_data_that_vanishes_fails_the_job_with_the_reason(ledger: Ledger, tmp_path: Path) -> None:
    job_id = await create_job(ledger, rollout={"num_prompts_per_iteration": 5})
    epoch = await start_training(ledger, job_id)
    await wait_open(ledger, job_id, 0)
    await asyncio.sleep(0.1)  # iteration 1 is prepared by now
    (tmp_path / "prompts.jsonl").unlink()
    for iteration in range(2):
        await wait_open(ledger, job_id, iteration)
        await drain(ledger, job_id)
        await commit(ledger, job_id, epoch, iteration)
    fields = await reaches(ledger, job_id, JobState.FAILED)
    assert fields["error"].startswith("iteration 2 has no prompts: data.path: there is no file prompts.jsonl")


@pytest.mark.usefixtures("conductors")
async def test_job_that_no_broker_understands_fails_and_does_not_stop_the_others(ledger: Ledger) -> None:
    good = await create_job(ledger)
    config = JobConfig.model_validate(job_body()).model_dump(mode="json") | {"of_a_later_version": 1}
    bad = f"{good}-bad"
    await ledger.create_job(bad, config, 3, 0)
    fields = await reaches(ledger, bad, JobState.FAILED)
    assert "of_a_later_version" in fields["error"]
    await start_training(ledger, good)
    await wait_open(ledger, good, 0)


# ---- the data process --------------------------------------------------------------------------------------------


def file_spec() -> DatasetSpec:
    return DatasetSpec.of_job(JobConfig.model_validate(job_body()))


async def test_data_process_serves_again_after_a_hang_and_a_crash(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    process = DatasetProcess(tmp_path, timeout_s=1.0, memory_mb=1024)
    assert len(await process.read(file_spec(), 0, 3)) == 3
    endless = ReasoningGymData(task="chain_sum", options={"min_terms": 10**9, "max_terms": 10**9})
    with pytest.raises(DatasetError, match=r"longer than 1 s|more than 1024 MB"):
        await process.read(DatasetSpec(data=endless, seed=0, num_items=1), 0, 1)
    assert len(await process.read(file_spec(), 3, 2)) == 2
    assert process._child
    process._child.kill()
    await process._child.wait()
    assert len(await process.read(file_spec(), 5, 1)) == 1
    await process.close()


async def test_cancelled_request_does_not_answer_the_next_one(process: DatasetProcess) -> None:
    spec = file_spec()
    await process.read(spec, 0, 1)
    abandoned = asyncio.create_task(process.read(spec, 0, 4))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    abandoned.cancel()
    await asyncio.gather(abandoned, return_exceptions=True)
    assert len(await process.read(spec, 0, 2)) == 2


async def test_data_process_ends_with_its_broker(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.broker.datasets.child", str(tmp_path), "1024"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin
    child.stdin.close()
    assert await asyncio.wait_for(child.wait(), 10) == 0


# ---- the process -------------------------------------------------------------------------------------------------


def start_broker(redis_port: int, port: int, folder: Path, **settings: str) -> "subprocess.Popen[str]":
    env = {"ONBEAT_REDIS_URL": f"redis://127.0.0.1:{redis_port}", "ONBEAT_PORT": str(port)}
    env |= {"ONBEAT_DATA_DIR": str(folder), "ONBEAT_LOG_FORMAT": "json", **settings}
    command = [sys.executable, "-m", "services.broker"]
    return subprocess.Popen(command, env=os.environ | env, stderr=subprocess.PIPE, text=True)


async def test_broker_process_survives_a_restart_of_redis_and_stops_with_zero(tmp_path: Path) -> None:
    redis_port, port = free_port(), free_port()
    redis = start_redis(redis_port, str(tmp_path))
    broker = start_broker(redis_port, port, tmp_path)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

            async def is_ready() -> bool:
                try:
                    return (await client.get("/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually("ready", is_ready, timeout_s=20)
            redis.terminate()
            redis.wait(10)
            assert (await client.get("/readyz")).status_code == 503
            assert (await client.get("/livez")).status_code == 200
            redis = start_redis(redis_port, str(tmp_path))
            await eventually("ready again", is_ready)
            ledger = Ledger(connect(f"redis://127.0.0.1:{redis_port}"))
            job_id = await create_job(ledger)
            waiting = asyncio.create_task(client.get(f"/v1/jobs/{job_id}/events?after=999999999999999&wait_s=30"))
            await asyncio.sleep(0.2)
            broker.send_signal(signal.SIGTERM)
            assert (await waiting).json() == {"events": []}  # a long poll does not hold up the end
            await ledger.redis.aclose()
        assert await asyncio.to_thread(broker.wait, 10) == 0
        assert broker.stderr
        lines = [json.loads(line) for line in broker.stderr.read().splitlines()]
        assert lines[0]["message"].startswith("serving http://127.0.0.1")
    finally:
        broker.kill()
        redis.terminate()
        redis.wait(10)


async def test_broker_without_redis_says_so_and_exits_non_zero(tmp_path: Path) -> None:
    port = free_port()
    broker = start_broker(port, free_port(), tmp_path, ONBEAT_REDIS_RETRY_S="1")
    assert await asyncio.to_thread(broker.wait, 20) == 1
    assert broker.stderr
    last = json.loads(broker.stderr.read().splitlines()[-1])
    assert last["level"] == "CRITICAL"
    assert f"no Redis at 127.0.0.1:{port}" in last["message"]
    assert "set ONBEAT_REDIS_URL" in last["message"]


async def test_broker_that_lost_redis_for_good_exits_non_zero(tmp_path: Path) -> None:
    redis_port = free_port()
    redis = start_redis(redis_port, str(tmp_path))
    broker = start_broker(redis_port, free_port(), tmp_path, ONBEAT_REDIS_RETRY_S="1")
    try:
        assert broker.stderr
        assert "serving" in await asyncio.to_thread(broker.stderr.readline)
        redis.terminate()
        redis.wait(10)
        assert await asyncio.to_thread(broker.wait, 30) == 1
        assert "the control loop gave up" in broker.stderr.read()
    finally:
        broker.kill()
        redis.kill()


async def test_broker_with_wrong_settings_names_them(tmp_path: Path) -> None:
    broker = start_broker(1, 1, tmp_path, ONBEAT_PORT="many")
    assert await asyncio.to_thread(broker.wait, 20) == 2
    assert broker.stderr
    assert "ONBEAT_PORT" in broker.stderr.read()
