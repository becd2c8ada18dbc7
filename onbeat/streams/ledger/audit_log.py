"""The chained log of every decision about a group, and the groups themselves, as an auditor reads them."""

from onbeat.streams import audit
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger.scripts import LedgerPart


class AuditLog(LedgerPart):
    """The audit log of all jobs."""

    async def entries(self, job_id: str, after: str = "-", count: int = 1000) -> list[audit.Entry]:
        """Return the next entries after the id `after`, oldest first; empty at the end."""
        start = after if after == "-" else f"({after}"
        found = await self.redis.xrange(JobKeys(job_id).audit, start, "+", count)
        return [
            audit.Entry(
                id=entry.decode(),
                line=fields.get(b"line", b"").decode(errors="replace"),
                link=fields.get(b"link", b"").decode(errors="replace"),
            )
            for entry, fields in found
        ]

    async def rollouts(self, job_id: str, after: str = "-", count: int = 64) -> list[tuple[str, bytes]]:
        """Return the next raw entries of the rollouts stream after the id `after`: (id, RolloutGroup)."""
        start = after if after == "-" else f"({after}"
        found = await self.redis.xrange(JobKeys(job_id).rollouts, start, "+", count)
        return [(entry.decode(), fields.get(b"group", b"")) for entry, fields in found]
