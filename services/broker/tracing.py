"""The export of each committed iteration as an OpenTelemetry trace: afterwards, from the ledger, and off by default.

It is level-triggered like the conductor. The ledger is the queue: it records which iterations are committed and how far
the export is, and keeps their data. So an unavailable collector or a restarted broker only costs a delay, up to
MAX_BEHIND iterations of a job.

    look (1 s) --> jobs with committed iterations that are left --> hold the job --> read, send, count as done

One broker at a time holds a job. If it dies between sending and counting, an iteration is sent again, with the same
ids.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Sequence

from redis.exceptions import RedisError

from onbeat.errors import JobNotFound
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.traces import TracedJob
from services.broker.live import log_crash
from services.broker.metrics import TraceMeters
from services.broker.otlp import SPANS_AT_ONCE, Collector, CollectorRefused, CollectorUnavailable
from services.broker.settings import Settings
from services.broker.trace_spans import JobHistory, TraceSpan, read_history, read_trace, trace_id

logger = logging.getLogger(__name__)

LOOK_S = 1.0
LEASE_S = 30.0  # lease of a job; longer than a request may take (otlp_timeout_s)
MAX_BEHIND = 1000  # committed iterations of a job that are still exported
CATCH_UP_S = 3600.0  # a job that has been over for longer is left alone
AT_ONCE = 20  # iterations of a job before other jobs have their turn
MAX_REST_S = 60.0  # the longest retry delay of an unavailable collector, and the time between two warnings
CLOSE_S = 3.0  # for iterations committed just before this broker ends


# Data from another trainer or rollout implementation raises these when it cannot be read or sent.
ODD = (ValueError, TypeError, LookupError, ArithmeticError)


class LostJob(Exception):
    """Another broker exports the job, or the job is gone."""


class Tracer:
    """The exporter of one broker. No failure here ends the broker."""

    def __init__(self, ledger: Ledger, settings: Settings, meters: TraceMeters) -> None:
        assert settings.otlp_endpoint is not None, "tracing is off"
        headers, ca = settings.otlp_headers(), settings.otlp_tls_ca
        self._collector = Collector(settings.otlp_endpoint, headers, ca, settings.otlp_timeout_s)
        self._ledger, self._meters, self._every = ledger, meters, settings.trace_every_iterations
        self._broker = uuid.uuid4().hex
        self._held: set[str] = set()  # jobs
        self._settled: set[str] = set()  # jobs that will have nothing left to export
        self._rest_s, self._rest_until = 0.0, 0.0  # retry delay, and its end by time.monotonic()
        self._said_at = -MAX_REST_S  # by time.monotonic()
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
        with contextlib.suppress(TimeoutError, RedisError):
            async with asyncio.timeout(CLOSE_S):
                for job_id in self._held:
                    await self._ledger.traces.hold(job_id, self._broker, lease_s=0)
        await self._collector.close()

    async def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stopping.is_set()
            try:
                await self.step()
            except RedisError as error:
                self._say(f"traces are exported later: {type(error).__name__}: {error}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()

    async def step(self) -> None:
        """Look at every job once, unless the retry delay of the collector is not over."""
        if time.monotonic() < self._rest_until:
            return
        now = await self._ledger.now()
        job_ids = [*await self._ledger.lists.started(), *await self._ledger.lists.ended_since(now - CATCH_UP_S)]
        self._settled &= set(job_ids)
        try:
            for job in await self._ledger.traces.jobs([each for each in job_ids if each not in self._settled]):
                is_old = job.finished_at is not None and now - job.finished_at > CATCH_UP_S
                if job.num_exported < job.num_committed and not is_old:
                    with contextlib.suppress(LostJob, JobNotFound):
                        await self._follow(job)
                elif job.state.is_final:
                    self._settled.add(job.job_id)
                    self._held.discard(job.job_id)
        except CollectorUnavailable as problem:
            self._rest(problem)

    # ---- one job -------------------------------------------------------------------------------------------------

    async def _follow(self, job: TracedJob) -> None:
        """Export the next iterations. Raises LostJob, JobNotFound and CollectorUnavailable."""
        first = max(await self._hold(job.job_id), job.num_exported)
        oldest = max(first, job.num_committed - MAX_BEHIND)
        if oldest > first:
            num_missed = sum(iteration % self._every == 0 for iteration in range(first, oldest))
            self._meters.traces.labels("missed").inc(num_missed)
            logger.warning("job %s: iterations %d to %d get no traces, they are too old", job.job_id, first, oldest - 1)
            await self._hold(job.job_id, next_iteration=oldest)
        history: JobHistory | None = None
        for iteration in range(oldest, min(oldest + AT_ONCE, job.num_committed)):
            if iteration % self._every == 0:
                history = history or await read_history(self._ledger, job.job_id, iteration)
                await self._export(history, iteration)
            if await self._hold(job.job_id, next_iteration=iteration + 1) > iteration + 1:
                return  # another broker had the job meanwhile and is further ahead

    async def _hold(self, job_id: str, next_iteration: int | None = None) -> int:
        """Return the first iteration left to export; all before `next_iteration` are done. Raises LostJob."""
        left = await self._ledger.traces.hold(job_id, self._broker, LEASE_S, next_iteration)
        if left is None:
            self._held.discard(job_id)
            raise LostJob(job_id)
        self._held.add(job_id)
        return left

    async def _export(self, history: JobHistory, iteration: int) -> None:
        """Export an iteration. Raises LostJob, JobNotFound and CollectorUnavailable: it is still to be done then."""
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
            self._say(f"{self._collector.url} refuses the trace of iteration {iteration} of job {job_id}: {problem}")
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
            if self._rest_s:
                logger.info("%s answers again", self._collector.url)
                self._rest_s, self._said_at = 0.0, -MAX_REST_S
            await self._hold(job_id)

    # ---- an unavailable collector --------------------------------------------------------------------------------

    def _rest(self, problem: CollectorUnavailable) -> None:
        self._meters.failures.inc()
        self._rest_s = min(MAX_REST_S, max(LOOK_S, 2 * self._rest_s))
        self._rest_until = time.monotonic() + self._rest_s
        self._say(f"no traces to {self._collector.url} for now: {problem}")

    def _say(self, message: str) -> None:
        """Log a warning, at most once per MAX_REST_S."""
        if time.monotonic() - self._said_at >= MAX_REST_S:
            self._said_at = time.monotonic()
            logger.warning("%s", message)
