"""The control loop, which opens the next iteration of every job as soon as its policy version is published.

The loop is level-triggered: every step reads the ledger and takes the actions that are due, and every change of a job's
state is a compare-and-set. So any number of brokers may run, and one that died half way leaves nothing to repair.

    scan (slow) --> one watcher per started job --> step --> wait for the job's next event (or a second) --> step ...

Of the pending jobs, only the next few have a watcher. So the load of a broker does not grow with the queue.
"""

import asyncio
import contextlib
import logging
import time

from redis.exceptions import RedisError, ResponseError

from onbeat.contracts.errors import IllegalTransition, JobNotFound
from onbeat.contracts.states import JobState
from onbeat.streams.ledger import Ledger
from services.broker.datasets.process import DatasetProcess
from services.broker.watcher import JobWatcher

logger = logging.getLogger(__name__)

SCAN_S = 0.25
NUM_NEXT = 4  # pending jobs that are watched: those that are next, so that their prompts are ready when a trainer comes
MAX_CRASHES = 3  # crashes of one job's watcher (our defects) within CRASH_WINDOW_S after which the job fails
CRASH_WINDOW_S = 600.0
MAX_BACKOFF_S = 5.0
CALM_S = 2 * MAX_BACKOFF_S  # Redis is well again after this long without a failure: watchers may fail after each scan


def is_refusal(error: Exception) -> bool:
    """Return whether Redis is there and refuses a command: it is full, or the data of one job is damaged."""
    return isinstance(error, ResponseError)  # a replica's refusal arrives as a lost connection


class Conductor:
    """The watchers of all active jobs. `run` ends only when it is cancelled, or when Redis has been away for
    `timeout_s`: then it raises the last error."""

    def __init__(self, ledger: Ledger, process: DatasetProcess, timeout_s: float) -> None:
        self._ledger, self._process, self._timeout_s = ledger, process, timeout_s
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._crashed_at: dict[str, list[float]] = {}  # recent crashes by job

    async def run(self) -> None:
        failing_since: float | None = None
        failed_at, backoff_s = 0.0, SCAN_S
        try:
            while True:
                began_at = time.monotonic()
                try:
                    await self._scan()
                    backoff_s = SCAN_S
                    if began_at - failed_at > CALM_S:
                        failing_since = None
                except Exception as error:  # a supervisor: after timeout_s of failures, the broker ends
                    logger.error("the control loop failed, trying again: %s: %s", type(error).__name__, error)
                    if not is_refusal(error):
                        failed_at = time.monotonic()
                        failing_since = failing_since or began_at
                        if failed_at + (failed_at - began_at) - failing_since > self._timeout_s:  # so would another try
                            raise
                    backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
                await asyncio.sleep(backoff_s)
        finally:
            for watcher in self._watchers.values():
                watcher.cancel()
            await asyncio.gather(*self._watchers.values(), return_exceptions=True)
            self._watchers.clear()

    async def _scan(self) -> None:
        """Start watchers for new jobs, and handle the watchers that have ended."""
        for job_id, watcher in list(self._watchers.items()):
            if watcher.done():
                del self._watchers[job_id]
                await self._look_after(job_id, watcher)
        for job_id in await self._ledger.lists.started_and_next(NUM_NEXT):
            if job_id not in self._watchers and len(self._recent_crashes(job_id)) < MAX_CRASHES:
                work = JobWatcher(self._ledger, self._process, job_id).run()
                self._watchers[job_id] = asyncio.create_task(work, name=f"watch {job_id}")

    async def _look_after(self, job_id: str, watcher: asyncio.Task[None]) -> None:
        error = watcher.exception()
        if error is None or isinstance(error, JobNotFound):  # final, or deleted by a process that died half way
            self._crashed_at.pop(job_id, None)
            await self._ledger.jobs.file(job_id)
        elif isinstance(error, RedisError):
            if is_refusal(error):
                logger.error("job %s: Redis refuses a command: %s", job_id, error)
            raise error
        else:
            await self._bury_after_crashes(job_id, error)

    async def _bury_after_crashes(self, job_id: str, error: BaseException) -> None:
        """Fail a job whose watcher keeps crashing: a defect of ours must neither loop for ever nor stop other jobs."""
        self._crashed_at[job_id] = [*self._recent_crashes(job_id), time.monotonic()]
        logger.error("watching job %s failed", job_id, exc_info=error)
        if len(self._crashed_at[job_id]) >= MAX_CRASHES:
            reason = f"the broker cannot conduct this job: {type(error).__name__}: {error}; see the broker's log"
            with contextlib.suppress(IllegalTransition):
                await self._ledger.jobs.move(job_id, JobState.FAILED, reason)

    def _recent_crashes(self, job_id: str) -> list[float]:
        now = time.monotonic()
        return [at for at in self._crashed_at.get(job_id, []) if now - at < CRASH_WINDOW_S]
