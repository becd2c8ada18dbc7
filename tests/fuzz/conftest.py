"""One real broker, a process of its own on a Redis of its own, for all that is thrown at its REST API."""

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from onbeat.config import JobConfig
from onbeat.contracts.records import PublishedWeights, WeightUpdate, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from tests.broker_fixtures import broker_process
from tests.conftest import own_redis
from tests.world import World, job_body

LONG_S = 3600.0
JOB_IDS = ("waiting", "running", "over")  # a job in each state, there from the start


@dataclass
class LiveBroker:
    url: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path

    def assert_unharmed(self) -> None:
        """It lives, works, and has logged no defect."""
        log = self.log.read_text()
        assert self.process.poll() is None, f"the broker ended: {log[-3000:]}"
        # The server says so where a request breaks off after its answer has begun: the stranger's loss, no defect.
        assert log.count("Traceback") == log.count("h11._util.LocalProtocolError"), log[-3000:]
        assert httpx.get(f"{self.url}/readyz", timeout=30).status_code == 200
        listed = httpx.get(f"{self.url}/v1/jobs", params={"limit": 500}, timeout=30).json()["jobs"]
        assert set(JOB_IDS) <= {job["id"] for job in listed}


@pytest.fixture(scope="package")
def live_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveBroker]:
    folder = tmp_path_factory.mktemp("broker")
    with own_redis(folder) as redis_url, broker_process(folder, redis_url) as (url, process):
        asyncio.run(seed(redis_url))
        yield LiveBroker(url, int(url.rpartition(":")[2]), process, folder / "log")


async def seed(redis_url: str) -> None:
    """Jobs that have something to show."""
    client = connect(redis_url, retry_s=5)
    ledger = Ledger(client)
    try:
        held_out = {"data": {"type": "jsonl", "path": "prompts.jsonl"}, "num_prompts": 2, "num_samples_per_prompt": 2}
        config = JobConfig.model_validate(job_body(evaluation=held_out))
        for job_id in JOB_IDS:
            await ledger.jobs.create(job_id, config.model_dump(mode="json"), config.schedule.num_iterations, 0)
        for job_id in ("running", "over"):
            await train(ledger, job_id, await World(ledger).start_training(job_id, LONG_S))
        await ledger.jobs.move("over", JobState.FAILED, "out of memory")
        await ledger.workers.heartbeat("default", WorkerRecord(id="w1", state="idle"))
    finally:
        await client.aclose()


async def train(ledger: Ledger, job_id: str, epoch: str) -> None:
    await World(ledger).wait_open(job_id, 0)
    update = WeightUpdate(received_bytes=10, sources=["h:1"], pull_s=0.1, apply_s=0.1, load_s=0.1)
    await ledger.versions.engine_ready(job_id, 0, "w1", update)
    await World(ledger).drain_evaluation(job_id, 0, timeout_s=60)
    published = PublishedWeights(full_bytes=1000, delta_bytes=20, encode_s=0.5, publish_s=0.75)
    await ledger.versions.announce(job_id, epoch, 1, "127.0.0.1:1", "d1", published)
    await World(ledger).commit(job_id, epoch, 0, prompt_tokens=12, response_tokens=8, reward_mean=0.5, train_s=0.1)
    await World(ledger).wait_open(job_id, 1)
