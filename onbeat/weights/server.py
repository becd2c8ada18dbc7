"""The server of payloads: the part that the trainer's weight server and a relaying rollout have in common.

A payload grows while it is received, and a peer that reads it waits for the bytes that it needs next: so a relay passes
on a payload that it has received only in part. All of this happens on one event loop.
"""

import asyncio
import logging
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, TypeAlias

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from onbeat.contracts.errors import WeightsError
from onbeat.weights.security import PLAIN, WireSecurity, bind, create_server, join_address
from onbeat.weights.v1 import weights_pb2
from onbeat.weights.wire import SERVICE, PayloadKey, Plan, data_message, plan_message, read_key

logger = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"  # context of a call

CHUNK_BYTES = 1 << 20  # messages of about 1 MiB are the sweet spot of gRPC from Python
# A source that waits for its own source sends signs of life, and its pullers stay; without one they look elsewhere.
SIGN_OF_LIFE_S = 3.0
GROWTH_DEADLINE_S = 60.0  # a source that got nothing for this long ends its pullers' streams
STOP_GRACE_S = 1.0
MIN_CHUNK_BYTES = 64 << 10
CHUNKS_A_PAYLOAD = 64  # a minimum: a relay passes whole messages on, so 64 hops take about as long as the payload


class PayloadGivenUp(WeightsError):
    """The owner of the payload moves on to another version."""


class Payload:
    """A payload on this host. `segments` together have the plan's size; their first `available` bytes are valid."""

    def __init__(
        self, key: PayloadKey, plan: Plan, segments: Sequence[memoryview], available: int | None = None
    ) -> None:
        self.key, self.plan = key, plan
        self._segments = segments
        self._starts = tuple(accumulate((len(segment) for segment in segments), initial=0))
        assert self._starts[-1] == plan.size_bytes, "segments and plan disagree"
        self.available = plan.size_bytes if available is None else available
        self._reason = ""  # the reason why it was given up; '' if it was not
        self._grown = asyncio.Event()

    @property
    def is_complete(self) -> bool:
        return self.available == self.plan.size_bytes

    def slices(self, start: int, end: int) -> list[memoryview]:
        """Return the bytes `start:end`, one slice per segment that they lie in."""
        pieces = []
        index = max(0, bisect_right(self._starts, start) - 1)
        while start < end:
            segment, offset = self._segments[index], start - self._starts[index]
            piece = segment[offset : offset + end - start]
            if len(piece):
                pieces.append(piece)
            start += len(piece)
            index += 1
        return pieces

    def advance(self, available: int) -> None:
        """Make the first `available` bytes valid and wake the readers."""
        self.available = available
        self._wake()

    def give_up(self, reason: str) -> None:
        """End the payload: its readers get PayloadGivenUp."""
        self._reason = reason
        self._wake()

    def check(self) -> None:
        if self._reason:
            raise PayloadGivenUp(f"{self.key} is given up: {self._reason}")

    async def wait_for(self, size_bytes: int, timeout_s: float | None = None) -> bool:
        """Return whether `size_bytes` bytes arrive in time. Raise PayloadGivenUp."""
        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while True:
            self.check()
            if self.available >= size_bytes:
                return True
            grown = self._grown
            try:
                async with asyncio.timeout_at(deadline):
                    await grown.wait()
            except TimeoutError:
                return False

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


class PayloadOwner(Protocol):
    """An owner of payloads."""

    async def payload(self, key: PayloadKey) -> Payload | None:
        """Return the payload; None when it is not here and not expected soon."""

    def versions(self) -> list[int]: ...


class PayloadServer:
    """A server of `Pull` only; subclasses add more of the service. It lives on one event loop, the owner's."""

    def __init__(
        self, job_id: str, owner: PayloadOwner, security: WireSecurity = PLAIN, max_concurrent_calls: int = 1024
    ) -> None:
        self._job_id, self._owner, self._security = job_id, owner, security
        self._max_concurrent_calls = max_concurrent_calls
        self._server: grpc.aio.Server | None = None
        self.num_bytes_sent = 0

    async def start(self, host: str, port: int) -> int:
        """Start to serve and return the port (0: the system chooses). Raise WeightsError when the port is taken."""
        self._server = create_server(self._security, self._max_concurrent_calls)
        self._server.add_generic_rpc_handlers((service_handler(self),))
        bound = bind(self._server, self._security, join_address(host, port))
        await self._server.start()
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=STOP_GRACE_S)

    async def Pull(self, request: weights_pb2.PullRequest, context: Context) -> AsyncIterator[bytes]:
        await self._check_job(request, context)
        key, offset = read_key(request.key), request.offset_bytes
        payload = await self._owner.payload(key)
        if payload is None:
            detail = f"{key} is not held here; versions held: {self._owner.versions()}"
            await context.abort(grpc.StatusCode.NOT_FOUND, detail)
        size = payload.plan.size_bytes
        if offset > size:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, f"{key} has {size} bytes, not {offset}")
        yield plan_message(key, payload.plan)
        chunk_bytes = min(CHUNK_BYTES, max(MIN_CHUNK_BYTES, size // CHUNKS_A_PAYLOAD))
        try:
            waited_s = 0.0
            while offset < size:
                if not await payload.wait_for(offset + 1, SIGN_OF_LIFE_S):
                    waited_s += SIGN_OF_LIFE_S
                    if waited_s >= GROWTH_DEADLINE_S:
                        raise WeightsError(f"{key}: byte {offset} has not come here for {waited_s:.0f} s")
                    yield data_message([])
                    continue
                waited_s = 0.0
                end = min(offset + chunk_bytes, payload.available)
                message = data_message(payload.slices(offset, end))
                self.num_bytes_sent += end - offset
                offset = end
                yield message
        except WeightsError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))

    async def _check_job(self, request: Any, context: Context) -> None:
        if not request.job_id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request names no job, or is not of this method")
        if request.job_id != self._job_id:
            detail = f"this address serves job {self._job_id}, not {request.job_id[:80]}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)


# ---- the service; its pull sends and receives bytes, which generated code would parse --------------------------------


def service_handler(servicer: object) -> grpc.GenericRpcHandler:
    """Return a handler of the service's methods that `servicer` has; the others are UNIMPLEMENTED."""
    methods: dict[str, Any] = {}
    for method in weights_pb2.DESCRIPTOR.services_by_name["WeightsService"].methods:
        if not hasattr(servicer, method.name):
            continue
        kind = "unary_stream" if method.server_streaming else "unary_unary"
        create = getattr(grpc, f"{kind}_rpc_method_handler")
        read = partial(read_request, message_factory.GetMessageClass(method.input_type))
        write = message_factory.GetMessageClass(method.output_type).SerializeToString
        methods[method.name] = create(getattr(servicer, method.name), read, None if method.name == "Pull" else write)
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def read_request(kind: type[Message], data: bytes) -> Message:
    """Return the request; an empty one, of no job, for unreadable bytes: gRPC would log a traceback of an error."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return kind()
