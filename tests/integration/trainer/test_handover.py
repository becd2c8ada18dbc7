"""A trainer that stops, is stuck or has lost its job leaves it to another one: real processes on a real Redis."""

import asyncio
import os
import socket
import ssl
import subprocess
import sys
import uuid
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from onbeat.config import JobConfig
from onbeat.contracts.errors import LeaseLost
from onbeat.contracts.states import JobState
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.trainer.job.lease import YIELD_S, ClaimedJob
from tests.waiting import eventually
from tests.world import World

SCRIPT = """
import ctypes, sys, time
import services.trainer.session as session

def train_for_ever(settings, job, world, tracking):
    while True:
        job.check()
        time.sleep(0.05)

def stuck_step(settings, job, world, tracking):
    job.status.enter_barrier(0)
    job.lease._watchdog._progressed_at -= 0.95 * settings.stall_s  # the warning is due at once, the end after stall_s
    ctypes.CDLL(None).sleep(600)

def serve(settings, job, world, tracking):
    job.serve_weights({{}}, settings, world)

session.run_job = {instead}
from services.trainer.__main__ import main
sys.exit(main())
"""
START_S = 60.0


@asynccontextmanager
async def trainer(ledger: Ledger, redis_url: str, folder: Path, instead: str, **settings: str):
    """Start a trainer with a job whose training is that function of SCRIPT; return (process, id of the job)."""
    pool = f"p{uuid.uuid4().hex[:8]}"
    job_id = await World(ledger).create_job(pool=pool)
    settings |= {"ONBEAT_REDIS_URL": redis_url, "ONBEAT_POOL": pool, "ONBEAT_DATA_DIR": str(folder)}
    command = (sys.executable, "-c", SCRIPT.format(instead=instead))
    environment = os.environ | settings | {"ONBEAT_DEVICE": "cpu", "ONBEAT_TRAINER_ID": "trainer-a"}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.PIPE)
    try:
        yield process, job_id
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def events_of(ledger: Ledger, job_id: str, kind: str) -> list[str]:
    return [event.message for event in await ledger.event_log.read(job_id) if event.kind == kind]


async def test_stopped_trainer_hands_its_job_over(ledger: Ledger, redis_url: str, tmp_path: Path) -> None:
    async with trainer(ledger, redis_url, tmp_path, "train_for_ever", ONBEAT_LEASE_S="600") as (process, job_id):
        is_training = partial(ledger.redis.hexists, JobKeys(job_id).job, "doing")
        await eventually("the trainer has the job", is_training, timeout_s=START_S)
        process.terminate()
        _, written = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 0
    assert f"job {job_id} is left to another trainer: this process was asked to stop" in written.decode()
    assert await events_of(ledger, job_id, "job.handed_over") == ["trainer-a leaves the job to another trainer"]
    assert await ledger.trainer.claim_job(job_id, "another", 30)  # although the lease was for ten minutes


async def test_paused_job_leaves_its_trainer_to_one_that_waits(
    ledger: Ledger, world: World, redis_url: str, tmp_path: Path
) -> None:
    async def has_trainer(job_id: str) -> bool:
        return float((await ledger.jobs.fields(job_id)).get("lease_until", "0")) > await ledger.now()

    async with trainer(ledger, redis_url, tmp_path, "train_for_ever") as (_, paused):
        await eventually("the trainer has the job", partial(has_trainer, paused), timeout_s=START_S)
        await ledger.jobs.move(paused, JobState.PAUSED)
        await asyncio.sleep(YIELD_S + 1)
        assert await has_trainer(paused)  # nobody else wants it
        pool = (await ledger.jobs.fields(paused))["pool"]
        other = await world.create_job(pool=pool)
        await eventually("the other job has the trainer", partial(has_trainer, other), timeout_s=YIELD_S + 10)
        assert not await has_trainer(paused)
        assert await events_of(ledger, paused, "job.handed_over") == ["trainer-a leaves the job to another trainer"]
        await ledger.jobs.move(other, JobState.PAUSED)
        await ledger.jobs.move(paused, JobState.RUNNING)  # it is in no queue, and waits all the same
        await eventually("the first job has it again", partial(has_trainer, paused), timeout_s=YIELD_S + 10)
        assert not await has_trainer(other)


async def test_stuck_trainer_ends_and_another_one_gets_its_job(ledger: Ledger, redis_url: str, tmp_path: Path) -> None:
    limits = {"ONBEAT_LEASE_S": "5", "ONBEAT_STALL_S": "10"}
    async with trainer(ledger, redis_url, tmp_path, "stuck_step", **limits) as (process, job_id):
        _, written = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 1
    assert "in stuck_step" in written.decode()
    (warning,) = await events_of(ledger, job_id, "trainer.stalled")
    assert "while at the barrier of iteration 0: sum over replicas and optimizer step: this process ends" in warning
    assert await ledger.trainer.claim_job(job_id, "at-once", 30) is None  # the lease was alive to the end
    await eventually("another trainer gets the job", lambda: ledger.trainer.claim_job(job_id, "another", 30))


async def test_trainer_that_cannot_serve_weights_leaves_its_job(ledger: Ledger, redis_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        place = {"ONBEAT_WEIGHTS_HOST": "127.0.0.1", "ONBEAT_WEIGHTS_PORT": port}
        async with trainer(ledger, redis_url, tmp_path, "serve", **place) as (process, job_id):
            _, written = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    reason = f"cannot listen on 127.0.0.1:{port}: its port is taken"
    assert f"job {job_id} is left to another trainer: {reason}" in written.decode()
    (event,) = await events_of(ledger, job_id, "trainer.failed")
    assert event.startswith(f"trainer-a ends: {reason}")
    assert await events_of(ledger, job_id, "job.handed_over")  # the trainer does not count as lost
    assert await ledger.trainer.claim_job(job_id, "another", 30)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"ONBEAT_WEIGHTS_TLS_CA": ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"},
            "ONBEAT_WEIGHTS_TLS_CA is set but ONBEAT_WEIGHTS_TLS_CERT is not",
        ),
        ({"ONBEAT_CPU_CORES": "4000"}, "none of the cores 4000 may be used by this process; it runs on "),
    ],
)
async def test_wrong_settings_of_a_trainer_cost_no_job(
    settings: dict[str, str], reason: str, ledger: Ledger, redis_url: str, tmp_path: Path
) -> None:
    async with trainer(ledger, redis_url, tmp_path, "train_for_ever", **settings) as (process, job_id):
        _, written = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, reason in written.decode()) == (1, True), written
    assert await ledger.jobs.state(job_id) is JobState.PENDING


@pytest.mark.parametrize("rank", [0, 1])
async def test_trainer_notices_between_its_writes_that_it_lost_its_job(
    rank: int, ledger: Ledger, world: World, lease_of
) -> None:
    job_id, epoch = await world.started_job()
    config = JobConfig.of_job(await ledger.jobs.fields(job_id))
    lease = lease_of(ClaimedJob(job_id, epoch, config, 30.0, rank))

    async def is_lost() -> bool:
        try:
            lease.check()
        except LeaseLost as error:
            return "has another trainer now" in str(error)
        return False

    assert not await is_lost()
    await ledger.redis.hincrby(JobKeys(job_id).job, "epoch", 1)  # as each claim does
    await eventually("the trainer knows", is_lost)
