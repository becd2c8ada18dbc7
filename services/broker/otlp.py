"""The wire format of traces: OTLP over HTTP, protobuf. This module is imported only when traces are exported.

The SDK's exporter is not used: it reads its own environment and retries by itself, while the broker can read anything
again from the ledger at any time, and needs deadlines that hold.
"""

import asyncio
import ssl
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import httpx
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from onbeat import __version__
from services.broker.settings import is_loopback
from services.broker.trace_spans import Attributes, TraceSpan, span_id, trace_id

SPANS_AT_ONCE = 512  # per request
RETRYABLE = frozenset({429, 502, 503, 504})  # those that the protocol names; all others are final
SAMPLED = 1  # flag of W3C's trace context


class CollectorUnavailable(Exception):
    """The collector cannot take spans now; a later try may succeed."""


class CollectorRefused(Exception):
    """The collector will never take these spans."""


# ---- messages --------------------------------------------------------------------------------------------------------


def encode(job_id: str, iteration: int, spans: Iterable[TraceSpan]) -> bytes:
    """Encode spans as one request."""
    by_process: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        by_process.setdefault((span.service, span.instance), []).append(to_message(job_id, iteration, span))
    scope = InstrumentationScope(name="onbeat", version=__version__)
    return ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(attributes=to_key_values(resource_of(service, instance))),
                scope_spans=[ScopeSpans(scope=scope, spans=messages)],
            )
            for (service, instance), messages in by_process.items()
        ]
    ).SerializeToString()


def resource_of(service: str, instance: str) -> Attributes:
    own = {"service.name": f"onbeat-{service}", "service.version": __version__}
    return own | ({"service.instance.id": instance} if instance else {})


def to_message(job_id: str, iteration: int, span: TraceSpan) -> Span:
    links = []
    if span.link:
        number, path = span.link
        trace, other = trace_id(job_id, number), span_id(job_id, number, path)
        links.append(Span.Link(trace_id=bytes.fromhex(trace), span_id=bytes.fromhex(other), flags=SAMPLED))
    return Span(
        trace_id=bytes.fromhex(trace_id(job_id, iteration)),
        span_id=bytes.fromhex(span_id(job_id, iteration, span.path)),
        parent_span_id=bytes.fromhex(span_id(job_id, iteration, span.parent)) if span.parent else b"",
        flags=SAMPLED,
        name=span.name,
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=to_nanoseconds(span.start),
        end_time_unix_nano=to_nanoseconds(span.end),
        attributes=to_key_values(span.attributes or {}),
        links=links,
        status=Status(code=Status.STATUS_CODE_ERROR, message=span.error) if span.error else None,
    )


def to_nanoseconds(time_s: float) -> int:
    """Convert seconds to nanoseconds, in whole microseconds: a float does not hold more."""
    return round(time_s * 1e6) * 1000


def to_key_values(attributes: Attributes) -> list[KeyValue]:
    return [KeyValue(key=key, value=to_value(value)) for key, value in attributes.items()]


def to_value(value: str | int | float) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=value)


# ---- sending ---------------------------------------------------------------------------------------------------------


class Collector:
    """A collector's client. `endpoint`: its http(s) base URL. `tls_ca`: PEM authority of its certificate, or None."""

    def __init__(self, endpoint: str, headers: dict[str, str], tls_ca: Path | None, timeout_s: float) -> None:
        self.url = f"{endpoint.rstrip('/')}/v1/traces"
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            headers={**headers, "Content-Type": "application/x-protobuf", "User-Agent": f"onbeat/{__version__}"},
            verify=ssl.create_default_context(cafile=tls_ca),
            trust_env=not is_loopback(urlsplit(endpoint).hostname or ""),  # no proxy between us and this machine
            timeout=timeout_s,
        )

    async def send(self, job_id: str, iteration: int, spans: Sequence[TraceSpan]) -> None:
        """Send up to SPANS_AT_ONCE spans of one trace. Raises CollectorUnavailable or CollectorRefused."""
        body = encode(job_id, iteration, spans)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._http.post(self.url, content=body)
        except TimeoutError as error:
            raise CollectorUnavailable(f"no answer within {self._timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise CollectorUnavailable(f"{type(error).__name__}: {error}") from error
        if answer.status_code in RETRYABLE:
            raise CollectorUnavailable(f"it answered {answer.status_code}")
        if not answer.is_success:
            raise CollectorRefused(f"it answered {answer.status_code}: {answer.text[:200]!r}")
        if num_rejected := rejected_spans(answer):
            raise CollectorRefused(f"it rejected {num_rejected} of {len(spans)} spans")

    async def close(self) -> None:
        await self._http.aclose()


def rejected_spans(answer: httpx.Response) -> int:
    """Return the number of spans that were rejected from a request that was accepted in part."""
    if not answer.headers.get("content-type", "").startswith("application/x-protobuf"):
        return 0
    try:
        return int(ExportTraceServiceResponse.FromString(answer.content).partial_success.rejected_spans)
    except DecodeError:
        return 0
