"""The export of each committed iteration as an OpenTelemetry trace: afterwards, from the ledger, and off by default.

It is level-triggered like the conductor. The ledger is the queue: it records which iterations are committed and how far
the export is, and keeps their data. So an unavailable collector or a restarted broker only costs a delay, up to
MAX_BEHIND iterations of a job.

    look (1 s) --> jobs with committed iterations that are left --> read, send, record

Nothing keeps two brokers from sending the same iteration, nor one that died between sending and recording: the spans
come again then, with the same ids.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence

from redis.exceptions import RedisError

from onbeat.errors import JobNotFound
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, first_iteration
from onbeat.types import JobState
from services.broker.metrics import TraceMeters
from services.broker.settings import Settings
from services.broker.tracing.collector import SPANS_AT_ONCE, Collector, CollectorRefused, CollectorUnavailable
from services.broker.tracing.tree import JobHistory, TraceSpan, read_history, read_trace, trace_id

logger = logging.getLogger(__name__)

LOOK_S = 1.0
MAX_BEHIND = 1000  # committed iterations of a job that are still exported
CATCH_UP_S = 3600.0  # a job that has been over for longer is left alone
AT_ONCE = 20  # iterations of a job before other jobs have their turn
MAX_REST_S = 60.0  # the longest retry delay of an unavailable collector, and the time between two warnings
CLOSE_S = 3.0  # for iterations committed just before this broker ends


# Data from another trainer or rollout implementation raises these when it cannot be read or sent.
ODD = (ValueError, TypeError, LookupError, ArithmeticError)


class Outage:
    """The retry delay of an unavailable collector, which doubles, and the time of the last warning."""

    def __init__(self) -> None:
        self._delay_s, self._over_at = 0.0, 0.0  # by time.monotonic(), as `_warned_at`
        self._warned_at = -MAX_REST_S

    def is_resting(self) -> bool:
        return time.monotonic() < self._over_at

    def begin(self) -> None:
        """Note a failure: the next delay begins."""
        self._delay_s = min(MAX_REST_S, max(LOOK_S, 2 * self._delay_s))
        self._over_at = time.monotonic() + self._delay_s

    def end(self) -> bool:
        """Note a success. Returns whether there was an outage."""
        if not self._delay_s:
            return False
        self._delay_s, self._warned_at = 0.0, -MAX_REST_S
        return True

    def warn(self, message: str) -> None:
        """Log a warning, at most once per MAX_REST_S."""
        if time.monotonic() - self._warned_at >= MAX_REST_S:
            self._warned_at = time.monotonic()
            logger.warning("%s", message)


class Tracer:
    """The exporter of one broker. No failure here ends the broker."""

    def __init__(self, ledger: Ledger, settings: Settings, meters: TraceMeters) -> None:
        self._collector = Collector(settings)
        self._ledger, self._meters, self._every = ledger, meters, settings.trace_every_iterations
        self._settled: set[str] = set()  # jobs that will have nothing left to export
        self._outage = Outage()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        logger.info("traces go to %s", self._collector.url)
        self._task = asyncio.create_task(self._run(), name="traces")
        self._task.add_done_callback(log_crash)

    async def close(self) -> None:
        """Export the last committed iterations, if that is quick, and leave the rest to other brokers."""
        self._stopping.set()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._collector.close()

    async def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            try:
                await self.step()
            except RedisError as error:
                self._outage.warn(f"traces are exported later: {type(error).__name__}: {error}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()

    async def step(self) -> None:
        """Look at every job once, unless the retry delay of the collector is not over."""
        if self._outage.is_resting():
            return
        now = await self._ledger.now()
        job_ids = [*await self._ledger.lists.started(), *await self._ledger.lists.ended_since(now - CATCH_UP_S)]
        self._settled &= set(job_ids)
        jobs = await existing_jobs(self._ledger, [each for each in job_ids if each not in self._settled])
        try:
            for job_id, fields in jobs.items():
                await self._try_to_follow(job_id, fields)
        except CollectorUnavailable as problem:
            self._meters.failures.inc()
            self._outage.begin()
            self._outage.warn(f"no traces to {self._collector.url} for now: {problem}")

    # ---- one job -------------------------------------------------------------------------------------------------

    async def _try_to_follow(self, job_id: str, fields: Fields) -> None:
        """Export the next iterations of a job, if it is still there and can be read. Raises CollectorUnavailable."""
        try:
            await self._follow(job_id, fields)
        except JobNotFound:
            return
        except ODD:
            logger.exception("job %s has no traces: it cannot be read", job_id)
            self._settled.add(job_id)

    async def _follow(self, job_id: str, fields: Fields) -> None:
        """Export the next iterations. Raises JobNotFound and CollectorUnavailable."""
        first = max(await self._ledger.iterations.next_untraced(job_id), first_iteration(fields))
        num_committed = int(fields["next_iteration"])
        if first >= num_committed and JobState(fields["state"]).is_final:
            self._settled.add(job_id)
        oldest = max(first, num_committed - MAX_BEHIND)
        if oldest > first:
            num_missed = sum(iteration % self._every == 0 for iteration in range(first, oldest))
            self._meters.traces.labels("missed").inc(num_missed)
            logger.warning("job %s: iterations %d to %d get no traces, they are too old", job_id, first, oldest - 1)
            await self._ledger.iterations.record_traced(job_id, oldest)  # so that they are counted once
        history: JobHistory | None = None
        for iteration in range(oldest, min(oldest + AT_ONCE, num_committed)):
            if iteration % self._every == 0:
                history = history or await read_history(self._ledger, job_id, iteration)
                await self._export(history, iteration)
            await self._ledger.iterations.record_traced(job_id, iteration + 1)

    async def _export(self, history: JobHistory, iteration: int) -> None:
        """Export an iteration. Raises JobNotFound and CollectorUnavailable: it is still to be done then."""
        job_id = history.job_id
        try:
            spans = await read_trace(self._ledger, history, iteration)
        except ODD:
            logger.exception("job %s: iteration %d cannot be made a trace", job_id, iteration)
            spans = None
        if spans is None:
            self._meters.traces.labels("missed").inc()
            return
        try:
            await self._send(job_id, iteration, spans)
        except CollectorRefused as problem:
            self._meters.traces.labels("refused").inc()
            self._outage.warn(
                f"{self._collector.url} refuses the trace of iteration {iteration} of job {job_id}: {problem}"
            )
            return
        except ODD:
            self._meters.traces.labels("refused").inc()
            logger.exception("job %s: the trace of iteration %d cannot be sent", job_id, iteration)
            return
        self._meters.traces.labels("exported").inc()
        logger.info("job %s: iteration %d is trace %s", job_id, iteration, trace_id(job_id, iteration))

    async def _send(self, job_id: str, iteration: int, spans: Sequence[TraceSpan]) -> None:
        for first in range(0, len(spans), SPANS_AT_ONCE):
            await self._collector.send(job_id, iteration, spans[first : first + SPANS_AT_ONCE])
            if self._outage.end():
                logger.info("%s answers again", self._collector.url)


def log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s: crashed", task.get_name(), exc_info=error)
