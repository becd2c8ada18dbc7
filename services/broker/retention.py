"""The removal of old data: contents of old iterations, jobs that ended long ago, remains of dead processes.

It also finds jobs that a dead process left in the wrong list, and pending ones that no trainer came for.

It is level-triggered like the conductor: any number of brokers may run it, and an interrupted removal is repeated.
"""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from redis.exceptions import OutOfMemoryError, RedisError

from onbeat.contracts.errors import JobNotFinal, JobNotFound
from onbeat.contracts.states import JobState
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from services.broker.deadlines import ARRIVAL_S, queued_at
from services.broker.watcher import fail_if_nobody_comes

logger = logging.getLogger(__name__)

LOOK_S = 30.0
JOBS_AT_ONCE, PAUSE_S = 20, 2.0
NEVER_CREATED_S = 3600.0  # an id that is listed for this long without a job is forgotten
DAY_S = 86_400.0


class Retention:
    """The removal loop; `run` ends only by cancellation. Jobs that are over are deleted after `job_retention_days` (0:
    never)."""

    def __init__(self, ledger: Ledger, job_retention_days: float) -> None:
        self._ledger, self._job_retention_s = ledger, job_retention_days * DAY_S
        self._unreadable: set[str] = set()
        self._trimmed_at = 0.0  # like the next, by time.monotonic()
        self._arrival_until = 0.0  # no pending job fails before this moment of time.monotonic()

    async def run(self) -> None:
        self._arrival_until = time.monotonic() + ARRIVAL_S
        while True:
            try:
                await self.step(pause_s=PAUSE_S)
            except RedisError as error:
                logger.warning("old data is kept for now: %s: %s", type(error).__name__, error)
            await asyncio.sleep(LOOK_S)

    async def trim_started(self) -> None:
        """Drop the old groups of the jobs that make new ones: `step` takes long where there are many other jobs."""
        self._trimmed_at = time.monotonic()
        for job_id, fields in (await existing_jobs(self._ledger, await self._ledger.lists.started())).items():
            with self._leaving_odd_ones(job_id):
                await trim(self._ledger, job_id, fields)

    async def step(self, pause_s: float = 0.0) -> None:
        """Look at every job once, a few at a time: many jobs take longer, but cost no more at any time. The jobs that
        make new groups are trimmed in between."""
        job_ids = await self._ledger.jobs.ids()
        for first in range(0, len(job_ids), JOBS_AT_ONCE):
            batch = job_ids[first : first + JOBS_AT_ONCE]
            existing, now = await existing_jobs(self._ledger, batch), await self._ledger.now()
            with suppress(OutOfMemoryError):  # the next commands free memory
                await self._ledger.lists.file(existing)
            for job_id in batch:
                with self._leaving_odd_ones(job_id):
                    await self._look_at(job_id, existing.get(job_id), now)
            if first + JOBS_AT_ONCE < len(job_ids):
                await asyncio.sleep(pause_s)
                if time.monotonic() - self._trimmed_at > LOOK_S:
                    await self.trim_started()

    async def _look_at(self, job_id: str, fields: dict[str, str] | None, now: float) -> None:
        if fields is None:
            return await self._clean_up(job_id)
        if fields["state"] == JobState.PENDING:
            deadline_s = float(json.loads(fields["config"])["schedule"]["start_deadline_s"])
            if now - queued_at(fields) > deadline_s and time.monotonic() > self._arrival_until:
                await fail_if_nobody_comes(self._ledger, fields, deadline_s)
        elif self._is_outdated(fields, now):
            await self._ledger.jobs.delete(job_id)
            logger.info("job %s is deleted, it was over for %g days", job_id, self._job_retention_s / DAY_S)
        else:
            await trim(self._ledger, job_id, fields)

    @contextmanager
    def _leaving_odd_ones(self, job_id: str) -> Iterator[None]:
        """Skip a job whose record cannot be read, and log it once, or that needs memory which Redis lacks; the data of
        others is still removed."""
        try:
            yield
        except (JobNotFinal, JobNotFound) as conflict:  # another process was faster
            logger.info("%s", conflict)
        except OutOfMemoryError as error:  # the removals so far free memory: the next look does the rest
            logger.warning("job %s is not cleaned up completely: %s", job_id, error)
        except (ValueError, LookupError, TypeError) as error:
            if job_id not in self._unreadable:
                logger.warning("the record of job %s cannot be read: %s: %s", job_id, type(error).__name__, error)
            self._unreadable.add(job_id)

    def _is_outdated(self, fields: dict[str, str], now: float) -> bool:
        is_final = JobState(fields["state"]).is_final
        return bool(self._job_retention_s) and is_final and now - float(fields["finished_at"]) > self._job_retention_s

    async def _clean_up(self, job_id: str) -> None:
        """Remove an id without a job: the process that was deleting or creating the job died."""
        if await self._ledger.jobs.is_deleted(job_id):
            await self._ledger.jobs.delete(job_id)
            return
        listed_at = await self._ledger.jobs.listed_at(job_id)
        if listed_at is not None and await self._ledger.now() - listed_at > NEVER_CREATED_S:
            await self._ledger.jobs.forget(job_id)


async def trim(ledger: Ledger, job_id: str, fields: dict[str, str]) -> None:
    """Drop the groups of all iterations that are old enough."""
    first, durable = int(fields.get("num_trimmed", "0")), int(fields.get("checkpoint_iteration", "0"))
    if durable <= first:
        return
    num_kept = json.loads(fields["config"]).get("retention", {}).get("rollout_iterations")
    if num_kept is None:  # the job is older than this section: all is kept
        return
    iteration = first
    while await ledger.iterations.trim(job_id, iteration, num_kept):
        iteration += 1
    if iteration > first:
        logger.info("job %s: the groups of iterations %d to %d are no longer kept", job_id, first, iteration - 1)
