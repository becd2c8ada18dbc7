import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest_asyncio

from onbeat.process.loop_thread import LoopThread
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from services.trainer.job.lease import ClaimedJob, Lease


@pytest_asyncio.fixture
async def lease_of(redis_url: str) -> AsyncIterator[Callable[[ClaimedJob], Lease]]:
    """Return a function that holds the lease of a claimed job, as a trainer does, until the test is over."""

    async def connected() -> Ledger:
        return Ledger(connect(redis_url))

    background, leases = LoopThread("trainer"), list[Lease]()
    ledger_of_thread = background.run(connected())

    def hold(job: ClaimedJob) -> Lease:
        leases.append(Lease(background, ledger_of_thread, job, threading.Event()))
        return leases[-1]

    yield hold
    for lease in leases:
        await asyncio.to_thread(lease.close)
    background.close(ledger_of_thread.redis.aclose())
