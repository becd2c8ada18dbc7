"""The lease of a job: renewed in the background for as long as this process trains it, on every rank."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.contracts.errors import LeaseLost, OnbeatError
from onbeat.contracts.states import JobState
from onbeat.process.loop_thread import LoopThread
from onbeat.streams.best_effort import best_effort
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from services.trainer.deadlines import FAREWELL_S
from services.trainer.job.interface import JobCancelled, Stopped
from services.trainer.job.status import Status
from services.trainer.job.watchdog import Watchdog

logger = logging.getLogger(__name__)

YIELD_S = 5.0  # a paused job leaves its trainer once another job has waited this long: an idle one takes that sooner

T = TypeVar("T")


@dataclass(frozen=True)
class ClaimedJob:
    """A job that this trainer has claimed, as one of its ranks sees it."""

    id: str
    epoch: str  # fences off earlier trainers of the job
    config: JobConfig
    lease_s: float
    rank: int = 0
    num_replicas: int = 1  # copies of the whole model; 1 if it is sharded over the ranks


class Lease:
    """A lease, held until `close`, and the way to the ledger under it."""

    def __init__(
        self,
        background: LoopThread,
        ledger: Ledger,
        job: ClaimedJob,
        stop: threading.Event,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.ledger, self.job = ledger, job
        self._background, self._stop, self._watchdog = background, stop, watchdog
        self.status = Status(on_step=self.progress)
        self._state = JobState.RUNNING
        self._lost: Exception | None = None
        self._must_yield = False  # it is paused, and another job needs the trainer
        self._heartbeat = background.start(self._keep())

    def progress(self) -> None:
        """Report to the watchdog that the main thread makes progress; `check` and `run` do so, too."""
        if self._watchdog is not None:
            self._watchdog.progress()

    def check(self) -> JobState:
        """Return the job's state. Raises LeaseLost, JobCancelled, Stopped, or what broke the heartbeat."""
        self.progress()
        if self._lost is not None:
            raise self._lost
        if self._stop.is_set():
            raise Stopped("this process was asked to stop")
        if self._must_yield:
            raise Stopped("it is paused, and another job waits for a trainer")
        if self._state is JobState.CANCELLING:
            raise JobCancelled
        if self._state.is_final:
            raise LeaseLost(self.job.id, f"is {self._state}")
        return self._state

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the background loop and wait for the result: a sign of progress. Raises TimeoutError."""
        result = self._background.run(coroutine)
        self.progress()
        return result

    def ask(self, question: Callable[[Ledger], Coroutine[Any, Any, T]]) -> T:
        """Ask the ledger from a thread that does not train: no sign of progress. Raises RedisError, TimeoutError."""
        return self._background.run(question(self.ledger))

    def close(self, is_handover: bool = False) -> None:
        """Give the lease back, so that another trainer need not wait for it to run out.

        `is_handover`: nothing is wrong with the job or with this trainer, which does not count as lost.
        """
        if self._watchdog is not None:
            self._watchdog.close()
        self._heartbeat.cancel()
        if self._lost is None and self.job.rank == 0:
            giving_back = self.ledger.trainer.give_back(self.job.id, self.job.epoch, is_handover)
            with best_effort(f"the lease of job {self.job.id} was not handed back; it runs out by itself", LeaseLost):
                self._background.run(giving_back, timeout_s=FAREWELL_S)

    # ---- in the background ---------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Renew in time, and notice a cancel within a second. A failure ends it: `check` raises it while training."""
        wanted_since = None  # since when the job is paused and another one waits
        try:
            while True:
                self._state = await self._renew()
                is_paused = self._state is JobState.PAUSED and self.job.rank == 0  # rank 0 decides
                if not (is_paused and await is_trainer_wanted(self.ledger, self.job.config.pool)):
                    wanted_since = None
                elif wanted_since is None:
                    wanted_since = time.monotonic()
                elif time.monotonic() - wanted_since > YIELD_S:
                    self._must_yield = True
                if self._watchdog is not None and (warning := self._watchdog.warning(self.status.doing)):
                    logger.error("job %s: %s", self.job.id, warning)
                    await self.ledger.event_log.emit(self.job.id, "trainer.stalled", warning)
                await asyncio.sleep(min(0.25, self.job.lease_s / 3))
        except (OnbeatError, RedisError) as error:
            self._lost = error

    async def _renew(self) -> JobState:
        """Renew the lease on rank 0; on other ranks, only check that it is still this trainer's."""
        job = self.job
        if job.rank == 0:
            return await self.ledger.trainer.renew_job(job.id, job.epoch, job.lease_s, self.status.doing)
        fields = await self.ledger.jobs.fields(job.id)
        if fields["epoch"] != job.epoch:
            raise LeaseLost(job.id)
        return JobState(fields["state"])


async def is_trainer_wanted(ledger: Ledger, pool: str) -> bool:
    """Return whether a job of the pool waits for a trainer: a pending one, or a running one that has lost its own."""
    if await ledger.lists.num_waiting(pool):
        return True
    started, now = await existing_jobs(ledger, await ledger.lists.started()), await ledger.now()
    running = [job for job in started.values() if job.get("pool") == pool and job["state"] == JobState.RUNNING]
    return any(float(job.get("lease_until", "0")) < now for job in running)
