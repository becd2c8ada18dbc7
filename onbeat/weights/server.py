"""The server of payloads: the part that the trainer's weight server and a relaying rollout have in common."""

import logging
from collections.abc import AsyncIterator
from typing import Protocol

import grpc
import grpc.aio

from onbeat.errors import WeightsError
from onbeat.weights.client import MAX_ANSWER_BYTES
from onbeat.weights.framing import CHUNK_BYTES
from onbeat.weights.payload import Payload, PayloadKey
from onbeat.weights.security import PLAIN, WireSecurity, bind, create_server
from onbeat.weights.wire import data_message, plan_message, read_key, service_handler

logger = logging.getLogger(__name__)

# A source that waits for its own source sends signs of life, and its pullers stay; without one they look elsewhere.
SIGN_OF_LIFE_S = 3.0
GROWTH_DEADLINE_S = 60.0  # a source that got nothing for this long ends its pullers' streams
STOP_GRACE_S = 1.0
MIN_CHUNK_BYTES = 64 << 10
CHUNKS_A_PAYLOAD = 64  # at least: a relay passes whole messages on, so 64 hops take about as long as the payload itself
SERVER_OPTIONS = [("grpc.max_send_message_length", MAX_ANSWER_BYTES)]


class Holder(Protocol):
    """An owner of payloads."""

    async def payload(self, key: PayloadKey) -> Payload | None:
        """Return the payload; None when it is not here and not expected soon."""

    def versions(self) -> list[int]: ...


class PayloadServer:
    """A server of `Pull` only; subclasses add more of the service. It lives on one event loop, the holder's."""

    def __init__(
        self, job_id: str, holder: Holder, security: WireSecurity = PLAIN, max_concurrent_calls: int = 1024
    ) -> None:
        self._job_id, self._holder, self._security = job_id, holder, security
        self._max_concurrent_calls = max_concurrent_calls
        self._server: grpc.aio.Server | None = None
        self.num_bytes_sent = 0

    async def start(self, host: str, port: int) -> int:
        """Start to serve and return the port (0: the system chooses). Raise WeightsError when the port is taken."""
        self._server = create_server(
            self._security, max_concurrent_calls=self._max_concurrent_calls, options=SERVER_OPTIONS
        )
        self._server.add_generic_rpc_handlers((service_handler(self),))
        bound = bind(self._server, self._security, f"{host}:{port}")
        await self._server.start()
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=STOP_GRACE_S)

    async def Pull(self, request, context) -> AsyncIterator[bytes]:  # type: ignore[no-untyped-def]
        await self._check_job(request, context)
        key, offset = read_key(request.key), request.offset_bytes
        payload = await self._holder.payload(key)
        if payload is None:
            detail = f"{key} is not held here; versions held: {self._holder.versions()}"
            await context.abort(grpc.StatusCode.NOT_FOUND, detail)
            raise AssertionError("abort raises")
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

    async def _check_job(self, request, context) -> None:  # type: ignore[no-untyped-def]
        if request.job_id != self._job_id:
            detail = f"this address serves job {self._job_id}, not {request.job_id}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)
