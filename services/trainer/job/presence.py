"""The heartbeat of a trainer, with or without a job: it shows that a trainer is available for jobs."""

import asyncio
import logging
from collections.abc import Sequence

from redis.exceptions import RedisError

from onbeat.contracts.deadlines import HEARTBEAT_S
from onbeat.contracts.records import TrainerRecord
from onbeat.machine.memory import read_memory
from onbeat.process.loop_thread import LoopThread
from onbeat.streams.best_effort import best_effort
from onbeat.streams.ledger import Ledger
from services.trainer.deadlines import FAREWELL_S

logger = logging.getLogger(__name__)


class Presence:
    """A heartbeat from construction to `close`. Set `job_id` while a job is trained. `trackers`: those installed;
    `devices`: what the trainer computes on, None if that is not known."""

    def __init__(
        self,
        background: LoopThread,
        ledger: Ledger,
        place: tuple[str, str],
        trackers: Sequence[str] = (),
        devices: list[str] | None = None,
    ) -> None:
        """Begin the heartbeat. `place`: pool and id of the trainer."""
        self.job_id: str | None = None
        self._devices = devices
        self._trackers = list(trackers)
        self._background, self._ledger, (self._pool, self._trainer_id) = background, ledger, place
        self._heartbeats = background.start(self._send_heartbeats())

    async def _send_heartbeats(self) -> None:
        has_cleaned = False
        while True:
            try:
                await self._send("training" if self.job_id else "idle")
                if not has_cleaned:
                    await self._ledger.trainers.forget_old(self._pool)
                    has_cleaned = True
            except RedisError as error:  # claims and a job's lease decide when Redis has been away for too long
                logger.warning("%s could not say that it is alive: %s", self._trainer_id, error)
            await asyncio.sleep(HEARTBEAT_S)

    async def _send(self, state: str) -> None:
        record = TrainerRecord(
            id=self._trainer_id,
            job_id=self.job_id,
            state=state,
            trackers=self._trackers,
            host=read_memory(),
            devices=self._devices,
        )
        await self._ledger.trainers.heartbeat(self._pool, record)

    def close(self) -> None:
        """Stop the heartbeat and report `stopped`, if Redis can be reached."""
        self._heartbeats.cancel()
        self.job_id = None
        with best_effort(f"Redis still lists {self._trainer_id}"):
            self._background.run(self._send("stopped"), timeout_s=FAREWELL_S)
