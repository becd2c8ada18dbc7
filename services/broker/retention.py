"""What is no longer kept: contents of old iterations, jobs that were over long ago, what a dead process left behind.

Level-triggered like the conductor: any number of brokers may run it, and one that died half way is repeated.
"""

import asyncio
import json
import logging

from redis.exceptions import RedisError

from onbeat.errors import JobNotFinal, JobNotFound
from onbeat.streams.ledger import Ledger
from onbeat.types import JobState

logger = logging.getLogger(__name__)

LOOK_S = 30.0
NEVER_CREATED_S = 3600.0  # an id that is listed for so long without a job
DAY_S = 86_400.0


class Retention:
    """`run` ends only by cancellation. `job_retention_days`: final jobs are deleted after so long; 0: never."""

    def __init__(self, ledger: Ledger, job_retention_days: float) -> None:
        self._ledger, self._job_retention_s = ledger, job_retention_days * DAY_S

    async def run(self) -> None:
        while True:
            try:
                await self.step()
            except RedisError as error:
                logger.warning("old data is kept for now: %s: %s", type(error).__name__, error)
            await asyncio.sleep(LOOK_S)

    async def step(self) -> None:
        """Look at every job once."""
        for job_id in await self._ledger.job_ids():
            try:
                fields = await self._ledger.job_fields(job_id)
                if self._is_outdated(fields, await self._ledger.now()):
                    await self._ledger.delete_job(job_id)
                    logger.info("job %s is deleted, it was over for %g days", job_id, self._job_retention_s / DAY_S)
                else:
                    await trim(self._ledger, job_id, fields)
            except JobNotFound:
                await self._clean_up(job_id)
            except JobNotFinal as conflict:
                logger.info("%s", conflict)

    def _is_outdated(self, fields: dict[str, str], now: float) -> bool:
        is_final = JobState(fields["state"]).is_final
        return bool(self._job_retention_s) and is_final and now - float(fields["finished_at"]) > self._job_retention_s

    async def _clean_up(self, job_id: str) -> None:
        """An id without a job: whoever was deleting it died, or whoever was about to create it."""
        if await self._ledger.is_deleted(job_id):
            await self._ledger.delete_job(job_id)
            return
        listed_at = await self._ledger.listed_at(job_id)
        if listed_at is not None and await self._ledger.now() - listed_at > NEVER_CREATED_S:
            await self._ledger.forget_job(job_id)


async def trim(ledger: Ledger, job_id: str, fields: dict[str, str]) -> None:
    """Drop the groups of all iterations that are old enough."""
    first, durable = int(fields.get("num_trimmed", "0")), int(fields.get("checkpoint_iteration", "0"))
    if durable <= first:
        return
    num_kept = json.loads(fields["config"]).get("retention", {}).get("rollout_iterations")
    if num_kept is None:  # a job from before there was this section: all is kept
        return
    iteration = first
    while await ledger.trim_iteration(job_id, iteration, num_kept):
        iteration += 1
    if iteration > first:
        logger.info("job %s: the groups of iterations %d to %d are no longer kept", job_id, first, iteration - 1)
