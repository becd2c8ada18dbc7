"""The heartbeats of rollouts."""

from onbeat.streams import keys
from onbeat.streams.heartbeats import Heartbeats, read_heartbeats
from onbeat.streams.ledger.scripts import Part
from onbeat.types import WorkerRecord


class Workers(Part):
    """The rollouts of all pools."""

    async def heartbeat(self, pool: str, worker: WorkerRecord) -> None:
        await self.redis.hset(keys.workers(pool), worker.id, worker.model_dump_json())

    async def remove(self, pool: str, worker_id: str) -> None:
        await self.redis.hdel(keys.workers(pool), worker_id)

    async def records(self, pool: str) -> list[WorkerRecord]:
        """Return the last heartbeats of a pool's rollouts, without unreadable ones."""
        return (await self.heartbeats(pool)).records

    async def heartbeats(self, pool: str) -> Heartbeats[WorkerRecord]:
        return read_heartbeats(await self.redis.hgetall(keys.workers(pool)), WorkerRecord)
