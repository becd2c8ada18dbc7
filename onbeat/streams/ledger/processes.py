"""The processes behind the jobs, by their heartbeats. An unreadable heartbeat is skipped, and its id is returned.

It may come from another version of Onbeat or from another program: no process may stop because of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from onbeat.contracts.records import TrainerRecord, WorkerRecord
from onbeat.streams.ledger.scripts import LedgerPart

FORGET_S = 86_400.0  # a process without a heartbeat for this long is dropped by the next one of its kind that starts

RecordT = TypeVar("RecordT", WorkerRecord, TrainerRecord)


@dataclass(frozen=True)
class Heartbeats(Generic[RecordT]):
    records: list[RecordT] = field(default_factory=list)  # records in the order of their ids
    unreadable: list[str] = field(default_factory=list)  # ids


class Processes(LedgerPart, Generic[RecordT]):
    """The rollouts of all pools, or the trainers."""

    def __init__(self, redis: Any, kind: type[RecordT], key_of: Callable[[str], str]) -> None:
        super().__init__(redis)
        self._kind: type[RecordT] = kind
        self._key_of = key_of

    async def heartbeat(self, pool: str, record: RecordT) -> None:
        """Write a heartbeat with the time of Redis: clocks of machines differ."""
        seen = record.model_copy(update={"last_seen_at": await self.now()})
        await self.redis.hset(self._key_of(pool), record.id, seen.model_dump_json())

    async def remove(self, pool: str, *ids: str) -> None:
        await self.redis.hdel(self._key_of(pool), *ids)

    async def heartbeats(self, pool: str) -> Heartbeats[RecordT]:
        beats: Heartbeats[RecordT] = Heartbeats()
        for name, text in sorted((await self.redis.hgetall(self._key_of(pool))).items()):
            try:
                beats.records.append(self._kind.model_validate_json(text))
            except ValidationError:
                beats.unreadable.append(name.decode(errors="replace"))
        return beats

    async def records(self, pool: str) -> list[RecordT]:
        """Return the last heartbeats of a pool's processes, without unreadable ones."""
        return (await self.heartbeats(pool)).records

    async def live(self, pool: str) -> list[RecordT]:
        now = await self.now()
        return [record for record in await self.records(pool) if record.is_alive(now)]

    async def forget_old(self, pool: str) -> None:
        """Drop processes without a heartbeat for FORGET_S, and unreadable ones: a live one writes its own again.

        Only a live process of the kind may call this: then none of those dropped is the pool's last sign of life. A
        rollout that stops takes itself off the list; a trainer stays, and waits for a trainer count from there.
        """
        now, beats = await self.now(), await self.heartbeats(pool)
        if gone := [record.id for record in beats.records if record.silence_s(now) > FORGET_S] + beats.unreadable:
            await self.remove(pool, *gone)
