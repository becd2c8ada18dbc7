"""A job is backed up in mid-iteration and restored elsewhere: it ends with the bits of the run that went on."""

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onbeat.config import JobConfig
from onbeat.contracts.data_folder import REDIS_FOLDER
from onbeat.contracts.states import JobState, Verdict
from onbeat.local.backup import write_backup
from onbeat.local.redis_choice import choose_server
from onbeat.local.redis_server import redis_service
from onbeat.local.restore import restore_backup
from onbeat.local.state import StackLock, create_data_dir
from onbeat.process.loop_thread import LoopThread
from onbeat.process.stacks import StackState
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from services.trainer.job.lease import ClaimedJob, Lease
from services.trainer.job.session import JobSession
from services.trainer.session import run_job
from services.trainer.settings import Settings
from services.trainer.world import ALONE
from tests.tiny_models import write_tied_model
from tests.trainer_fixtures import make_group
from tests.waiting import eventually, wait_until
from tests.world import World, tasks_for

NUM_ITERATIONS, NUM_GROUPS, BACKED_UP_IN = 5, 4, 3
LEASE_S = 3.0


@contextmanager
def stack_in(data_dir: Path) -> Iterator[str]:
    """Be a stack of which only Redis runs. Yield its URL."""
    create_data_dir(data_dir)
    lock = StackLock(data_dir)
    service, url = redis_service(data_dir, choose_server(data_dir / REDIS_FOLDER))
    process = subprocess.Popen(service.command, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: not service.missing(), "Redis answers", 20)
        lock.write(StackState(os.getpid(), "up", "http://127.0.0.1:1", url, time.time()))
        yield url
    finally:
        process.kill()
        process.wait(10)
        lock.release()


def train(url: str, data_dir: Path, job_id: str) -> Path:
    """Be the trainer to the end of the job. Return its last checkpoint."""

    async def claim(ledger: Ledger) -> tuple[str, JobConfig]:
        epoch = await eventually("the lease is free", lambda: ledger.trainer.claim_job(job_id, "trainer-0", LEASE_S))
        return epoch, JobConfig.of_job(await ledger.jobs.fields(job_id))

    async def connected() -> Ledger:
        return Ledger(connect(url))

    background = LoopThread("trainer")
    ledger = background.run(connected())
    epoch, config = background.run(claim(ledger))
    claimed = ClaimedJob(job_id, epoch, config, LEASE_S)
    job = JobSession(Lease(background, ledger, claimed, threading.Event()))
    try:
        run_job(Settings(redis_url=url, data_dir=data_dir, device="cpu"), job, ALONE)
        background.run(ledger.jobs.move(job_id, JobState.SUCCEEDED, epoch=epoch))
        return Path(background.run(ledger.jobs.fields(job_id))["checkpoint"])
    finally:
        job.close()
        background.close(ledger.redis.aclose())


async def generate(ledger: Ledger, job_id: str, backup: tuple[Path, Path] | None = None) -> None:
    """Be broker and rollout to the end of the job; write the backup when the middle of an iteration is generated."""
    while int((fields := await ledger.jobs.fields(job_id))["next_iteration"]) < NUM_ITERATIONS:
        iteration, version = int(fields["num_opened"]), int(fields.get("policy_version", "-1"))
        if iteration == version < NUM_ITERATIONS:
            assert await ledger.iterations.open(job_id, iteration, version, tasks_for(iteration, NUM_GROUPS)) == ""
        for claim in await ledger.rollout.claim(job_id, "rollout-0", 1, 0.01):
            task = claim.task
            group = make_group(task.group_id, version=task.policy_version)
            group.worker_id = "rollout-0"
            assert await ledger.rollout.submit(job_id, claim.entry_id, group) is Verdict.ACCEPTED
            if backup is not None and task.group_id == f"{BACKED_UP_IN}-{NUM_GROUPS // 2}":
                await asyncio.to_thread(write_backup, *backup)
        await asyncio.sleep(0.01)


async def run_to_the_end(data_dir: Path, job_id: str | None, backup: tuple[Path, Path] | None = None) -> Path:
    with stack_in(data_dir) as url:
        redis = connect(url)
        job_id = job_id or await World(Ledger(redis)).create_job(
            model={"path": str(data_dir.parent / "model"), "dtype": "float32"},
            rollout={"num_prompts_per_iteration": NUM_GROUPS, "num_samples_per_prompt": 3, "max_response_tokens": 8},
            optimizer={"learning_rate": 1e-3},
            schedule={"num_iterations": NUM_ITERATIONS, "mode": "sync", "iteration_deadline_s": 20},
            checkpoint={"every_iterations": 2},
        )
        generating = asyncio.create_task(generate(Ledger(redis), job_id, backup))
        checkpoint = await asyncio.to_thread(train, url, data_dir, job_id)
        await generating
        await redis.aclose()
        return checkpoint


async def test_restored_job_ends_with_the_bits_of_the_whole_run(tmp_path: Path) -> None:
    write_tied_model(tmp_path / "model")
    file = tmp_path / "backup.tar"
    whole = await run_to_the_end(tmp_path / "first", None, (tmp_path / "first", file))
    (job,) = await asyncio.to_thread(restore_backup, file, tmp_path / "second")
    assert (job.state, job.next_iteration, job.checkpoint_iteration) == (JobState.RUNNING, BACKED_UP_IN, 2)
    again = await run_to_the_end(tmp_path / "second", job.id)
    assert again == tmp_path / "second" / whole.relative_to(tmp_path / "first")
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
