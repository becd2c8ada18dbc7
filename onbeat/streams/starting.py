"""The announcement of trainers and rollouts that start: until their libraries are loaded they send no heartbeat."""

import asyncio
from collections.abc import Sequence

from redis.asyncio import Redis

from onbeat.contracts.records import TrainerRecord, WorkerRecord
from onbeat.machine.memory import read_memory
from onbeat.streams.best_effort import best_effort
from onbeat.streams.ledger import Ledger

ANNOUNCE_S = 3.0


async def announce_start(redis: Redis, pool: str, trainers: Sequence[str] = (), rollouts: Sequence[str] = ()) -> None:
    """Announce services of this machine by their ids. Their first heartbeats replace this. Without Redis nothing is
    announced."""
    ledger, host = Ledger(redis), read_memory()
    with best_effort("the doctor will not know that a service is starting"):
        async with asyncio.timeout(ANNOUNCE_S):
            for trainer in trainers:
                await ledger.trainers.heartbeat(pool, TrainerRecord(id=trainer, state="starting"))
            for rollout in rollouts:
                await ledger.workers.heartbeat(pool, WorkerRecord(id=rollout, state="starting", host=host))
