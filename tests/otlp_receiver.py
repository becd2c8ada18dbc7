"""A collector of OpenTelemetry traces: OTLP over HTTP on this machine, each span checked as it comes."""

import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

MAX_BODY_BYTES = 4 * 1024 * 1024  # limit of common collectors


@dataclass(frozen=True)
class Received:
    """One span, as text and seconds."""

    name: str
    trace_id: str
    id: str
    parent_id: str
    start: float
    end: float
    service: str
    instance: str
    attributes: dict[str, Any]
    links: tuple[tuple[str, str], ...]  # (trace id, span id)
    error: str


@dataclass
class Receiver:
    """`answer`: what becomes of a request, (status, body); it may sleep. `certificate` and its key: for TLS."""

    port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    answer: Callable[[ExportTraceServiceRequest], tuple[int, bytes]] = lambda _: (200, OK)
    spans: list[Received] = field(default_factory=list)  # spans of the requests that were answered 200
    num_requests: int = 0
    headers: list[dict[str, str]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        self._server.daemon_threads = True
        if self.certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate, self.key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    @property
    def traces(self) -> dict[str, list[Received]]:
        """By their ids."""
        traces: dict[str, list[Received]] = {}
        for span in list(self.spans):
            traces.setdefault(span.trace_id, []).append(span)
        return traces

    def most_often(self) -> int:
        """Return how often the most frequent span came."""
        return max(Counter((span.trace_id, span.id) for span in list(self.spans)).values(), default=0)

    def _handler(receiver) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                assert length <= MAX_BODY_BYTES
                receiver.num_requests += 1
                receiver.headers.append(dict(self.headers.items()))
                is_right = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                request = ExportTraceServiceRequest.FromString(self.rfile.read(length))
                status, body = receiver.answer(request) if is_right else (404, b"")
                if status == 200:
                    receiver.spans += received(request)
                self.send_response(status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


OK = ExportTraceServiceResponse().SerializeToString()


def received(request: ExportTraceServiceRequest) -> list[Received]:
    spans = []
    for group in request.resource_spans:
        about = values(group.resource.attributes)
        for scope in group.scope_spans:
            assert scope.scope.name == "onbeat"
            spans += [one(span, about["service.name"], about.get("service.instance.id", "")) for span in scope.spans]
    return spans


def one(span: Span, service: str, instance: str) -> Received:
    assert (len(span.trace_id), len(span.span_id), len(span.parent_span_id)) in ((16, 8, 0), (16, 8, 8))
    assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano, span
    is_error = span.status.code == Status.STATUS_CODE_ERROR
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        service=service,
        instance=instance,
        attributes=values(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        error=span.status.message if is_error else "",
    )


def values(attributes: "list[KeyValue] | Any") -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, str(attribute.value.WhichOneof("value"))) for attribute in attributes
    }
