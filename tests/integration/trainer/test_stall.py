"""A trainer that is stuck below Python keeps its job no longer than its limit: real processes on a real Redis."""

import asyncio
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from onbeat.streams.ledger import Ledger
from tests.broker_fixtures import create_job
from tests.waiting import eventually

SCRIPT = """
import ctypes, sys
import services.trainer.session as session

def stuck_step(settings, job, world):
    job.doing = "at the barrier"
    job.lease._watchdog._progressed_at -= 0.95 * settings.stall_s  # the warning is due at once, the end after stall_s
    ctypes.{library}(None).sleep(600)

session.run_job = stuck_step
from services.trainer.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])  # that one lets other threads run, this one does not
async def test_stuck_trainer_ends_and_another_one_gets_its_job(
    ledger: Ledger, redis_url: str, tmp_path: Path, library: str
) -> None:
    pool = f"p{uuid.uuid4().hex[:8]}"
    job_id = await create_job(ledger, pool=pool)
    settings = {
        "ONBEAT_REDIS_URL": redis_url,
        "ONBEAT_POOL": pool,
        "ONBEAT_DATA_DIR": str(tmp_path),
        "ONBEAT_DEVICE": "cpu",
        "ONBEAT_LEASE_S": "5",
        "ONBEAT_STALL_S": "10",
    }
    command = [sys.executable, "-c", SCRIPT.format(library=library)]
    options = {"env": os.environ | settings, "capture_output": True, "text": True, "timeout": 90, "check": False}
    ended = await asyncio.to_thread(subprocess.run, command, **options)
    assert ended.returncode == 1
    assert "in stuck_step" in ended.stderr
    warnings = [event.message for event in await ledger.event_log.read(job_id) if event.kind == "trainer.stalled"]
    if library == "CDLL":
        assert "while at the barrier: this process ends" in warnings[0]
        assert len(warnings) == 1
        assert await ledger.trainer.claim_job(job_id, "at-once", 30) is None  # its lease was alive to the end
    await eventually("another trainer gets the job", lambda: ledger.trainer.claim_job(job_id, "another", 30))
