"""The end of a service, as its supervisor sees it: an event for the jobs that it served, and a lease that is free."""

import asyncio
from dataclasses import dataclass

from redis.asyncio import Redis

from onbeat.streams.best_effort import best_effort
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger

PROCESS_ENDED = "process.ended"
TELL_S = 3.0


@dataclass(frozen=True)
class ProcessEnd:
    """A process that is gone."""

    process: str  # id of the trainer or rollout, or else the name of the service
    run: str  # the id that its supervisor gave to this run of it; "" if it has none
    exit_code: int  # as a shell gives it: 128 and the number of the signal
    message: str


async def tell_end(redis: Redis, pool: str, end: ProcessEnd) -> int:
    """Emit `process.ended` for the jobs that a process served, and end the leases of this run of a trainer.

    A process that served none may keep a job of its pool from starting: then those that are started and the next one
    get the event. Return the number of jobs that were told; 0 if Redis does not answer.
    """
    ledger, num_told = Ledger(redis), 0
    with best_effort(f"no event says that {end.process} ended; its leases run out by themselves"):
        async with asyncio.timeout(TELL_S):
            jobs = await existing_jobs(ledger, await ledger.lists.started_and_next(1))
            ours = {job_id: fields for job_id, fields in jobs.items() if fields.get("pool") == pool}
            beats = [*await ledger.trainers.records(pool), *await ledger.workers.records(pool)]
            served = {record.job_id for record in beats if record.id == end.process}
            served |= {job_id for job_id, fields in ours.items() if fields.get("owner") == end.process}
            data = {"process": end.process, "exit_code": end.exit_code}
            for job_id in [job_id for job_id in ours if job_id in served] or ours:
                await ledger.event_log.emit(job_id, PROCESS_ENDED, end.message, data)
                num_told += 1
                if end.run:
                    await ledger.trainer.release_job(job_id, end.run)
    return num_told
