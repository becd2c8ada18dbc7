"""The heartbeat of a trainer, whether it has a job or not: others see that somebody asks for jobs."""

import asyncio
import logging

from redis.exceptions import RedisError

from onbeat.streams.inspection import forget_old_trainers, trainer_heartbeat
from onbeat.streams.ledger import Ledger
from services.trainer.background import Background

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0


class Presence:
    """From here to `close`. Set `job_id` while a job is trained."""

    def __init__(self, background: Background, ledger: Ledger, pool: str, trainer_id: str) -> None:
        self.job_id: str | None = None
        self._background, self._ledger, self._pool, self._trainer_id = background, ledger, pool, trainer_id
        self._heartbeats = background.start(self._send_heartbeats())

    async def _send_heartbeats(self) -> None:
        has_cleaned = False
        while True:
            try:
                await self._send("training" if self.job_id else "idle")
                if not has_cleaned:
                    await forget_old_trainers(self._ledger, self._pool)
                    has_cleaned = True
            except RedisError as error:  # claims and the lease of a job decide when Redis is away for too long
                logger.warning("%s could not say that it is alive: %s", self._trainer_id, error)
            await asyncio.sleep(HEARTBEAT_S)

    async def _send(self, state: str) -> None:
        await trainer_heartbeat(self._ledger, self._pool, self._trainer_id, state, self.job_id)

    def close(self) -> None:
        """Say farewell, as far as Redis can be reached."""
        self._background.cancel(self._heartbeats)
        self.job_id = None
        try:
            self._background.run(self._send("stopped"), timeout_s=5)
        except (RedisError, TimeoutError) as error:
            logger.warning("Redis still lists %s: %s", self._trainer_id, error)
