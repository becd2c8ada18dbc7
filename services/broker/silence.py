"""The events of trainers and rollouts that fall silent, for the jobs that they served. A supervisor that has seen a
process end tells it at once, and with the reason; this is for all others, such as containers and other machines."""

import asyncio
import logging

from redis.exceptions import RedisError

from onbeat.contracts.deadlines import SILENT_S
from onbeat.contracts.records import ProcessRecord
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from services.broker.deadlines import RECENT_S

logger = logging.getLogger(__name__)

LOOK_S = 2.0


async def watch_silence(ledger: Ledger) -> None:
    """Look for silent processes until this is cancelled. While Redis is away nothing is told."""
    while True:
        try:
            await tell_silence(ledger)
        except RedisError as error:
            logger.info("no look at silent processes: %s", error)
        await asyncio.sleep(LOOK_S)


async def tell_silence(ledger: Ledger) -> None:
    """Emit `process.silent` for each process that serves a started job and has just fallen silent."""
    started = await existing_jobs(ledger, await ledger.lists.started())
    for pool in {fields["pool"] for fields in started.values() if "pool" in fields}:
        now = await ledger.now()
        for process in [*await ledger.trainers.records(pool), *await ledger.workers.records(pool)]:
            if process.job_id in started and is_newly_silent(process, now):
                message = f"{process.id} has been silent for {SILENT_S:.0f} s: it ended, hangs or lost its connection; "
                message += "see the log of its container or machine"
                await ledger.event_log.emit_silence(process.job_id, process.id, process.last_seen_at, message)


def is_newly_silent(process: ProcessRecord, now: float) -> bool:
    """Return whether a process that did not sign off has fallen silent, and not long ago."""
    is_away = process.state != "stopped" and not process.is_starting(now)
    return is_away and SILENT_S < process.silence_s(now) < RECENT_S
