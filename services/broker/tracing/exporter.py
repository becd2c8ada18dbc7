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
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from redis.exceptions import RedisError

from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.records import Event
from onbeat.contracts.states import JobState
from onbeat.process.network import is_loopback
from onbeat.streams.inspection import existing_jobs, newest_events
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, first_iteration
from services.broker.metrics import Meters
from services.broker.settings import Settings
from services.broker.tracing.tree import read_trace, trace_id

logger = logging.getLogger(__name__)
# We log what becomes of each trace, and once per RETRY_S that the collector is away.
logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

LOOK_S = 1.0
RETRY_S = 30.0  # time between two tries to reach an unavailable collector
MAX_BEHIND = 1000  # committed iterations of a job that are still exported
CATCH_UP_S = 3600.0  # a job that has been over for longer is left alone
CLOSE_S = 3.0  # time for iterations committed just before this broker ends
SPANS_AT_ONCE = 512  # per request
RETRYABLE = frozenset({429, 502, 503, 504})  # statuses that the protocol names; all others are final
GRACE_S = 1.0  # time after the exporter's own deadline, which a collector that sends single bytes can pass
# Data from another trainer or rollout implementation raises these when it cannot be read.
ODD = (ValueError, TypeError, LookupError, ArithmeticError)


class CollectorUnavailable(Exception):
    """The collector cannot take spans now; a later try may succeed."""


class Session(requests.Session):
    """A session that keeps the outcome of its last request: the exporter says only whether it succeeded."""

    outcome: requests.Response | OSError | None = None

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        try:
            self.outcome = answer = super().send(request, **options)
        except OSError as error:  # as all errors of requests are
            self.outcome = error
            raise
        return answer


class Collector:
    """A collector's client: the exporter of OpenTelemetry's SDK, which blocks, in a thread with a deadline."""

    def __init__(self, settings: Settings) -> None:
        assert settings.otlp_endpoint is not None, "tracing is off"
        self.url = f"{settings.otlp_endpoint.rstrip('/')}/v1/traces"
        self._timeout_s = settings.otlp_timeout_s
        system, self._session = ssl.get_default_verify_paths(), Session()
        self._session.trust_env = False  # else .netrc and REQUESTS_CA_BUNDLE could replace key and authority
        if not is_loopback(urlsplit(self.url).hostname or ""):
            self._session.proxies = requests.utils.get_environ_proxies(self.url)
        self._exporter = OTLPSpanExporter(
            self.url,
            certificate_file=str(settings.otlp_tls_ca or system.cafile or system.capath or ""),
            headers=settings.otlp_headers(),
            timeout=self._timeout_s,
            session=self._session,
        )
        self._sending: Future[SpanExportResult] | None = None

    async def send(self, spans: Sequence[ReadableSpan]) -> str:
        """Send spans, and return '' or why they will never be taken. Raises CollectorUnavailable."""
        if self._sending is not None and not self._sending.done():
            raise CollectorUnavailable("it has not answered the last request")
        self._session.outcome = None
        self._sending = self._export(spans)
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                await asyncio.wrap_future(self._sending)
        except TimeoutError as error:
            raise CollectorUnavailable(f"no answer within {self._timeout_s:g} s") from error
        answer = self._session.outcome
        if answer is None:
            return "it cannot be encoded, or is too large: the exporter's message above says which"
        if isinstance(answer, OSError):
            raise CollectorUnavailable(f"no answer: {answer}")
        if answer.status_code in RETRYABLE:
            raise CollectorUnavailable(f"it answered {answer.status_code}")
        # The exporter takes a redirection for a success.
        return "" if 200 <= answer.status_code < 300 else f"it answered {answer.status_code}: {answer.text[:200]!r}"

    def _export(self, spans: Sequence[ReadableSpan]) -> Future[SpanExportResult]:
        """Export in a thread that does not keep the process from ending."""
        future: Future[SpanExportResult] = Future()
        future.set_running_or_notify_cancel()  # a waiting caller may be cancelled, the future may not
        threading.Thread(
            target=lambda: future.set_result(self._exporter.export(spans)), name="traces", daemon=True
        ).start()
        return future

    def close(self) -> None:
        self._exporter.shutdown()


class Tracer:
    """The exporter of one broker. No failure here ends the broker."""

    def __init__(self, ledger: Ledger, settings: Settings, meters: Meters) -> None:
        self._collector = Collector(settings)
        self._ledger, self._meters, self._every = ledger, meters, settings.trace_every_iterations
        self._settled: set[str] = set()  # jobs that are over and have nothing left to export
        self._unreadable: set[str] = set()
        self._retry_at = 0.0  # a time of time.monotonic()
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
        while not self._stopping.is_set():
            await self.step()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._stopping.wait()
        await self.step()

    async def step(self) -> None:
        """Look at every job once, unless the retry delay is not over."""
        try:
            now = await self._ledger.now()
            started, ended = await self._ledger.lists.started(), await self._ledger.lists.ended_since(now - CATCH_UP_S)
            self._settled &= set(ended)  # one that is resumed has more to export
            self._unreadable &= {*started, *ended}
            if time.monotonic() < self._retry_at:
                return
            skipped = self._settled | self._unreadable
            jobs = await existing_jobs(self._ledger, [name for name in (*started, *ended) if name not in skipped])
            for job_id, fields in jobs.items():
                try:
                    await self._follow(job_id, fields)
                except JobNotFound:  # it was deleted meanwhile
                    continue
                except ODD:
                    logger.exception("job %s has no more traces: it cannot be read", job_id)
                    self._unreadable.add(job_id)
        except (CollectorUnavailable, RedisError) as problem:
            self._meters.trace_failures.inc()
            self._retry_at = time.monotonic() + RETRY_S
            logger.warning(
                "no traces to %s for %g s: %s: %s", self._collector.url, RETRY_S, type(problem).__name__, problem
            )

    async def _follow(self, job_id: str, fields: Fields) -> None:
        """Export the next iterations of a job. Raises JobNotFound and CollectorUnavailable."""
        num_committed = int(fields["next_iteration"])
        next_untraced = await self._ledger.iterations.next_untraced(job_id)
        left = range(max(next_untraced, first_iteration(fields), num_committed - MAX_BEHIND), num_committed)
        if not left and JobState(fields["state"]).is_final:
            self._settled.add(job_id)
        events = await newest_events(self._ledger, job_id) if left else []
        for iteration in left:
            if iteration % self._every == 0:
                self._meters.traces.labels(await self._export(fields, events, iteration)).inc()
            await self._ledger.iterations.record_traced(job_id, iteration + 1)

    async def _export(self, job: Fields, events: Sequence[Event], iteration: int) -> str:
        """Read and send a trace, and return what became of it. Raises JobNotFound and CollectorUnavailable."""
        try:
            spans = await read_trace(self._ledger, job, events, iteration)
        except ODD as error:
            reason = f"{type(error).__name__}: {error}"
            logger.warning("job %s: iteration %d cannot be read and has no trace: %s", job["id"], iteration, reason)
            return "unreadable"
        if spans is None:
            return "missed"
        for first in range(0, len(spans), SPANS_AT_ONCE):
            if refusal := await self._collector.send(spans[first : first + SPANS_AT_ONCE]):
                logger.warning("the trace of iteration %d of job %s is refused: %s", iteration, job["id"], refusal)
                return "refused"
        logger.info("job %s: iteration %d is trace %s", job["id"], iteration, trace_id(job["id"], iteration))
        return "exported"


def log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s: crashed", task.get_name(), exc_info=error)
