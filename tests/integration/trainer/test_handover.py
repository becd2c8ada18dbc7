"""A trainer that is asked to stop hands its job over in good order; one that has lost its job stops by itself."""

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from onbeat.config import JobConfig
from onbeat.errors import LeaseLost
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.trainer.job.lease import ClaimedJob
from tests.broker_fixtures import create_job, started_job
from tests.waiting import eventually

SCRIPT = """
import sys, time
import services.trainer.session as session

def train_for_ever(settings, job, world):
    while True:
        job.check()
        time.sleep(0.05)

session.run_job = train_for_ever
from services.trainer.__main__ import main
sys.exit(main())
"""
START_S = 60.0


async def test_stopped_trainer_hands_its_job_over(ledger: Ledger, redis_url: str, tmp_path: Path) -> None:
    pool = f"p{uuid.uuid4().hex[:8]}"
    job_id = await create_job(ledger, pool=pool)
    settings = {
        "ONBEAT_REDIS_URL": redis_url,
        "ONBEAT_POOL": pool,
        "ONBEAT_DATA_DIR": str(tmp_path),
        "ONBEAT_DEVICE": "cpu",
        "ONBEAT_TRAINER_ID": "trainer-a",
        "ONBEAT_LEASE_S": "600",
    }
    command = (sys.executable, "-c", SCRIPT)
    process = await asyncio.create_subprocess_exec(*command, env=os.environ | settings, stderr=subprocess.PIPE)

    async def is_training() -> bool:
        return "doing" in await ledger.jobs.fields(job_id)

    try:
        await eventually("the trainer has the job", is_training, START_S)
        process.terminate()
        _, stderr = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    assert f"job {job_id} is left to another trainer: this process was asked to stop" in stderr.decode()
    handovers = [event.message for event in await ledger.event_log.read(job_id) if event.kind == "job.handed_over"]
    assert handovers == ["trainer-a leaves the job to another trainer"]
    assert await ledger.trainer.claim_job(job_id, "another", 30)  # although the lease was for ten minutes


@pytest.mark.parametrize("rank", [0, 1])
async def test_trainer_notices_between_its_writes_that_it_lost_its_job(rank: int, ledger: Ledger, lease_of) -> None:
    job_id, epoch = await started_job(ledger)
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
