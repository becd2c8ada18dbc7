"""The chained log of every decision about a group, and the groups themselves, as an auditor reads them."""

from onbeat.streams import audit
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger.scripts import LedgerPart, as_text


class AuditLog(LedgerPart):
    """The audit log of all jobs."""

    async def entries(self, job_id: str, after: str = "-", count: int = 1000) -> list[audit.Entry]:
        """Return the next entries after the id `after`, oldest first; empty at the end."""
        found = await self._next_entries(JobKeys(job_id).audit, after, count)
        texts = [(entry, as_text(fields)) for entry, fields in found]
        return [audit.Entry(entry, fields.get("line", ""), fields.get("link", "")) for entry, fields in texts]

    async def rollouts(self, job_id: str, after: str = "-", count: int = 64) -> list[tuple[str, bytes]]:
        """Return the next raw entries of the rollouts stream after the id `after`: (id, RolloutGroup)."""
        found = await self._next_entries(JobKeys(job_id).rollouts, after, count)
        return [(entry, fields.get(b"group", b"")) for entry, fields in found]

    async def _next_entries(self, stream: str, after: str, count: int) -> list[tuple[str, dict[bytes, bytes]]]:
        found = await self.redis.xrange(stream, after if after == "-" else f"({after}", "+", count)
        return [(entry.decode(), fields) for entry, fields in found]
