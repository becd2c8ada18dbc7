"""The way to a collector: OpenTelemetry's own exporter, OTLP over HTTP. Imported only when traces are exported.

The exporter blocks and says only whether it succeeded. It runs in a thread, with a deadline, and its HTTP session notes
what the collector answered: one that is away is asked again later, what it refuses is not sent again.
"""

import asyncio
import logging
import ssl
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from onbeat import __version__
from onbeat.network import is_loopback
from services.broker.settings import Settings
from services.broker.tracing.tree import TraceSpan, span_id, trace_id

SPANS_AT_ONCE = 512  # per request
RETRYABLE = frozenset({429, 502, 503, 504})  # those that the protocol names; all others are final
GRACE_S = 1.0  # beyond the exporter's own deadline, which a collector that sends single bytes can pass
SCOPE = InstrumentationScope("onbeat", __version__)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
LARGEST_TIME = 2**63 - 1  # nanoseconds

# The tracer logs what becomes of each request, at most once a minute while the collector is away.
logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)


class CollectorUnavailable(Exception):
    """The collector cannot take spans now; a later try may succeed."""


class CollectorRefused(Exception):
    """The collector will never take these spans."""


# ---- spans -----------------------------------------------------------------------------------------------------------


def to_otel(job_id: str, iteration: int, span: TraceSpan) -> ReadableSpan:
    """Return the span in the terms of OpenTelemetry. Raises ValueError or OverflowError for a time that it has not."""
    return ReadableSpan(
        name=span.name,
        context=context_of(job_id, iteration, span.path),
        parent=context_of(job_id, iteration, span.parent) if span.parent else None,
        resource=resource_of(span.service, span.instance),
        attributes=span.attributes,
        links=[Link(context_of(job_id, *span.link))] if span.link else [],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=to_nanoseconds(span.start),
        end_time=to_nanoseconds(span.end),
        instrumentation_scope=SCOPE,
    )


def context_of(job_id: str, iteration: int, path: str) -> SpanContext:
    trace, span = trace_id(job_id, iteration), span_id(job_id, iteration, path)
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=SAMPLED)


@cache
def resource_of(service: str, instance: str) -> Resource:
    own = {"service.name": f"onbeat-{service}", "service.version": __version__}
    return Resource(own | ({"service.instance.id": instance} if instance else {}))


def to_nanoseconds(time_s: float) -> int:
    """Convert seconds to nanoseconds, in whole microseconds: a float does not hold more."""
    time_ns = round(time_s * 1e6) * 1000
    if not 0 <= time_ns <= LARGEST_TIME:
        raise OverflowError(f"{time_s:g} s is no time of a span")
    return time_ns


# ---- sending ---------------------------------------------------------------------------------------------------------


class CollectorSession(requests.Session):
    """An HTTP session that notes what became of the last request, and trusts the authorities in `verify` alone."""

    outcome: requests.Response | requests.RequestException | None = None

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        try:
            # `options` may name the authorities of REQUESTS_CA_BUNDLE.
            answer = self.outcome = super().send(request, **options | {"verify": self.verify})
        except requests.RequestException as error:
            self.outcome = error
            raise
        return answer


class Collector:
    """A collector's client, for one request at a time."""

    def __init__(self, settings: Settings) -> None:
        assert settings.otlp_endpoint is not None, "tracing is off"
        self.url = f"{settings.otlp_endpoint.rstrip('/')}/v1/traces"
        self._timeout_s = settings.otlp_timeout_s
        system = ssl.get_default_verify_paths()
        self._session = CollectorSession()
        self._session.auth = lambda request: request  # else a .netrc could replace the key
        # No proxy between us and this machine.
        self._session.trust_env = not is_loopback(urlsplit(settings.otlp_endpoint).hostname or "")
        self._exporter = OTLPSpanExporter(
            self.url,
            certificate_file=str(settings.otlp_tls_ca or system.cafile or system.capath or ""),
            headers=settings.otlp_headers(),
            timeout=self._timeout_s,
            session=self._session,
        )
        self._sending: Future[None] | None = None

    async def send(self, job_id: str, iteration: int, spans: Sequence[TraceSpan]) -> None:
        """Send up to SPANS_AT_ONCE spans of one trace. Raises CollectorUnavailable or CollectorRefused, and ValueError
        or OverflowError for spans that cannot be sent."""
        if self._sending is not None and not self._sending.done():
            raise CollectorUnavailable("it has not answered the last request")
        self._session.outcome = None
        self._sending = self._export([to_otel(job_id, iteration, span) for span in spans])
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                await asyncio.wrap_future(self._sending)
        except TimeoutError as error:
            raise CollectorUnavailable(f"no answer within {self._timeout_s:g} s") from error
        outcome = self._session.outcome
        if outcome is None:
            raise CollectorRefused("they cannot be encoded")
        if not isinstance(outcome, requests.Response):
            raise CollectorUnavailable(f"{type(outcome).__name__}: {outcome}")
        if outcome.status_code in RETRYABLE:
            raise CollectorUnavailable(f"it answered {outcome.status_code}")
        if not 200 <= outcome.status_code < 300:  # the exporter takes a redirection for a success
            raise CollectorRefused(f"it answered {outcome.status_code}: {outcome.text[:200]!r}")

    def _export(self, spans: list[ReadableSpan]) -> Future[None]:
        """Export in a thread that does not keep the process from ending."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # who waits for it may be cancelled, it may not

        def export() -> None:
            try:
                self._exporter.export(spans)
            finally:
                future.set_result(None)

        threading.Thread(target=export, name="traces", daemon=True).start()
        return future

    def close(self) -> None:
        self._exporter.shutdown()
