"""The logs of a job: its events, for people, and the audit log, a chain of every decision about a group."""

import json
from typing import Any

from onbeat.contracts.records import Event
from onbeat.streams import audit
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger.scripts import LedgerPart, as_text
from onbeat.streams.stream_ids import time_of

UNREADABLE_EVENT = "event.unreadable"
NUM_LOOKED_AT = 500  # newest events that may tell of a silence already


class EventLog(LedgerPart):
    """The events of all jobs."""

    async def emit(self, job_id: str, kind: str, message: str, data: dict[str, Any] | None = None) -> None:
        await self._run("emit_event", JobKeys(job_id), [], kind, message, json.dumps(data or {}))

    async def emit_silence(self, job_id: str, process: str, last_seen_at: float, message: str) -> bool:
        """Emit `process.silent`, once for each silence. Return False if an event tells it already."""
        args = (process, last_seen_at, NUM_LOOKED_AT, message)
        return bool(await self._run("emit_silence", JobKeys(job_id), [], *args))

    async def read(
        self, job_id: str, after: str = "0", timeout_s: float | None = None, count: int = 500
    ) -> list[Event]:
        """Return events after the cursor, oldest first; wait up to `timeout_s` for the first one."""
        block = None if timeout_s is None else max(1, int(timeout_s * 1000))
        answer = await self.redis.xread({JobKeys(job_id).events: after}, count=count, block=block)
        return [to_event(entry, fields) for entry, fields in answer[0][1]] if answer else []


def to_event(entry: bytes, fields: dict[bytes, bytes]) -> Event:
    """Return the event, or one that says that it cannot be read: readers go on after it, and people see it."""
    event_id = entry.decode()
    try:
        return Event(
            id=event_id,
            time=float(fields[b"time"]),
            kind=fields[b"kind"].decode(),
            message=fields[b"message"].decode(),
            data=json.loads(fields[b"data"]) or {},
        )
    except (ValueError, KeyError, RecursionError):
        message = "an entry of this stream is no event: another version of Onbeat or somebody else wrote it"
        return Event(id=event_id, time=time_of(event_id), kind=UNREADABLE_EVENT, message=message)


class AuditLog(LedgerPart):
    """The audit logs of all jobs, and the groups themselves, as an auditor reads them."""

    async def entries(self, job_id: str, after: str = "-", count: int = 1000) -> list[audit.Entry]:
        """Return the next entries after the id `after`, oldest first; empty at the end."""
        entries = await self._next_entries(JobKeys(job_id).audit, after, count)
        texts = [(entry, as_text(fields)) for entry, fields in entries]
        return [audit.Entry(entry, fields.get("line", ""), fields.get("link", "")) for entry, fields in texts]

    async def rollouts(self, job_id: str, after: str = "-", count: int = 64) -> list[tuple[str, bytes]]:
        """Return the next raw entries of the rollouts stream after the id `after`: (id, RolloutGroup)."""
        entries = await self._next_entries(JobKeys(job_id).rollouts, after, count)
        return [(entry, fields.get(b"group", b"")) for entry, fields in entries]

    async def _next_entries(self, stream: str, after: str, count: int) -> list[tuple[str, dict[bytes, bytes]]]:
        entries = await self.redis.xrange(stream, after if after == "-" else f"({after}", "+", count)
        return [(entry.decode(), fields) for entry, fields in entries]
