"""The typed calls of the weights service, and the connections of a host. `pull` describes what a pull consists of.

Every failure is a WeightsError that names the address; every wait has a deadline.
"""

import asyncio
import contextlib
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from onbeat.contracts.errors import VersionNotHeld, WeightsError
from onbeat.weights.security import PLAIN, WireSecurity, call_metadata, create_channel, tls_remedy
from onbeat.weights.v1 import weights_pb2
from onbeat.weights.wire import SERVICE, Manifest, PayloadKey, Plan, key_message, read_manifest, read_message

Answer = TypeVar("Answer", bound=Message)

MESSAGE_DEADLINE_S = 15.0  # longest silence inside a pull: a live source that has nothing to send sends a sign of life
PROGRESS_S, PROGRESS_BYTES = 60.0, 64 << 10  # a pull that receives less than this in this time is aborted
FILE_NAME = re.compile(r"\w[\w .+-]{0,199}")  # names of the model's files: never a path
CALL_DEADLINE_S = 60.0  # limit for calls with a single answer


@dataclass(frozen=True)
class ModelDescription:
    """A model without its weights."""

    files: dict[str, bytes]
    policy_version: int


@dataclass(frozen=True)
class Itinerary:
    """A version and the deltas that lead to it from the base in the request. Without steps it is pulled in full."""

    manifest: Manifest
    steps: tuple[weights_pb2.Step, ...] = ()
    age_s: float = 0.0  # since the version's optimizer step began


class WeightsClient:
    """A client for one job's weights at one address (`host:port`)."""

    def __init__(self, address: str, job_id: str, security: WireSecurity = PLAIN) -> None:
        self.address = address
        self.job_id = job_id
        self._security = security
        self._channel, self._metadata = create_channel(address, security), call_metadata(security)
        self._pull: Callable[..., Any] = self._channel.unary_stream(  # the answers are bytes
            f"/{SERVICE}/Pull", request_serializer=weights_pb2.PullRequest.SerializeToString
        )
        self._watch: Callable[..., Any] = self._channel.unary_stream(
            f"/{SERVICE}/Watch",
            request_serializer=weights_pb2.WatchRequest.SerializeToString,
            response_deserializer=weights_pb2.WatchResponse.FromString,
        )

    async def describe(self) -> ModelDescription:
        request = weights_pb2.DescribeRequest(job_id=self.job_id)
        with self._as_weights_error("describe the model"):
            answer = await self._ask("Describe", request, weights_pb2.DescribeResponse)
            for file in answer.files:
                if not FILE_NAME.fullmatch(file.name):
                    raise WeightsError(f"a model file is named {file.name[:80]!r}: expected a plain file name")
        return ModelDescription({file.name: file.content for file in answer.files}, answer.policy_version)

    async def itinerary(self, version: int, base_version: int | None = None) -> Itinerary:
        """Return the manifest of a version and the deltas that lead to it.

        Raise VersionNotHeld, or WeightsError when the manifest contradicts its own digest.
        """
        request = weights_pb2.GetManifestRequest(job_id=self.job_id, policy_version=version, base_version=base_version)
        with self._as_weights_error(f"get the manifest of version {version}", not_found=VersionNotHeld):
            answer = await self._ask("GetManifest", request, weights_pb2.GetManifestResponse)
            manifest = read_manifest(answer)
            if not 0 <= answer.age_s < math.inf:
                raise WeightsError(f"the answer says that the version is {answer.age_s} s old")
        if manifest.policy_version != version:
            raise WeightsError(f"{self.address} sent the manifest of version {manifest.policy_version}, not {version}")
        return Itinerary(manifest, tuple(answer.steps), answer.age_s)

    async def locate(self, key: PayloadKey, puller: weights_pb2.Peer, failed: Sequence[str]) -> str:
        """Return the address to pull from; `failed` lists the addresses that did not deliver."""
        request = weights_pb2.LocateRequest(
            job_id=self.job_id, key=key_message(key), puller=puller, failed_addresses=failed
        )
        with self._as_weights_error(f"locate {key}"):
            return (await self._ask("Locate", request, weights_pb2.LocateResponse)).address

    async def finish(self, key: PayloadKey, worker_id: str, is_complete: bool) -> None:
        """Report that the pull has ended. `is_complete`: this shard of the version is now held here in full."""
        request = weights_pb2.FinishRequest(
            job_id=self.job_id, key=key_message(key), worker_id=worker_id, is_complete=is_complete
        )
        with self._as_weights_error(f"finish {key}"):
            await self._ask("Finish", request, weights_pb2.FinishResponse)

    async def pull(
        self, key: PayloadKey, offset_bytes: int = 0, slowest_s: float = math.inf
    ) -> AsyncGenerator[Plan | memoryview, None]:
        """Yield the plan, then the payload's bytes from the offset on. Raise WeightsError, also after long silence, and
        when the source is so slow that they would take longer than `slowest_s`."""
        request = weights_pb2.PullRequest(job_id=self.job_id, key=key_message(key), offset_bytes=offset_bytes)
        call = self._pull(request, metadata=self._metadata)
        try:
            with self._as_weights_error(f"pull {key}"):
                messages = aiter(call)
                started, received, has_plan = time.monotonic(), 0, False
                began, num_wanted, num_data = started, 0, 0  # the last two: bytes of the payload
                while True:
                    now = time.monotonic()
                    if now - started > PROGRESS_S:
                        if received < PROGRESS_BYTES:
                            raise WeightsError(f"only {received} bytes in {PROGRESS_S:.0f} s")
                        started, received = now, 0
                    if num_data < num_wanted * (now - began - PROGRESS_S) / slowest_s:  # it may have waited itself
                        raise WeightsError(f"only {num_data} of {num_wanted} bytes in {now - began:.0f} s")
                    async with asyncio.timeout(MESSAGE_DEADLINE_S):
                        message = await anext(messages, None)
                    if message is None:
                        return
                    received += len(message)
                    part = read_message(key, message)
                    if isinstance(part, Plan):
                        if has_plan:  # an endless series of plans would pass for progress
                            raise WeightsError("a second plan came")
                        has_plan, num_wanted = True, part.size_bytes - offset_bytes
                    else:
                        num_data += len(part)
                    if part or isinstance(part, Plan):  # an empty part is a sign of life
                        yield part
        finally:
            call.cancel()

    async def watch(self) -> AsyncIterator[int]:
        """Yield the current version, then each newer one. Raise WeightsError when the server is gone."""
        with self._as_weights_error("watch for versions"):
            request = weights_pb2.WatchRequest(job_id=self.job_id)
            async for answer in self._watch(request, metadata=self._metadata):
                yield checked(answer).policy_version

    async def close(self) -> None:
        await self._channel.close()

    async def _ask(self, method: str, request: Message, answer: type[Answer]) -> Answer:
        call: Callable[..., Awaitable[Answer | None]] = self._channel.unary_unary(
            f"/{SERVICE}/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return checked(await call(request, timeout=CALL_DEADLINE_S, metadata=self._metadata))

    @contextlib.contextmanager
    def _as_weights_error(self, doing: str, not_found: type[WeightsError] = WeightsError) -> Iterator[None]:
        failed = f"could not {doing} at {self.address}"
        try:
            yield
        except grpc.aio.AioRpcError as error:
            kind = not_found if error.code() is grpc.StatusCode.NOT_FOUND else WeightsError
            details = str(error.details())
            remedy = tls_remedy(self._security, details)
            raise kind(f"{failed}: {remedy and remedy + ': '}{error.code().name}: {details}") from error
        except WeightsError as error:
            raise WeightsError(f"{failed}: {error}") from error
        except TimeoutError as error:
            raise WeightsError(f"{failed}: silent for {MESSAGE_DEADLINE_S:.0f} s") from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            # gRPC also cancels when the channel is closed; a task ended by that would pass for a cancelled one.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            raise WeightsError(f"{failed}: the connection was closed here") from error


class Connections:
    """The clients of a host, one for each address. `peer` is how the host presents itself to others."""

    def __init__(self, connect: Callable[[str], WeightsClient], peer: weights_pb2.Peer) -> None:
        self.connect, self.peer = connect, peer
        self._clients: dict[str, WeightsClient] = {}
        self._background: set[asyncio.Task[None]] = set()

    def client(self, address: str) -> WeightsClient:
        if address not in self._clients:
            self._clients[address] = self.connect(address)
        return self._clients[address]

    async def drop(self, address: str) -> None:
        """Close the connection; the next call opens a new one."""
        if (client := self._clients.pop(address, None)) is not None:
            await client.close()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a call that no caller waits for; `close` cancels it if it is still running."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()


def checked(answer: Answer | None) -> Answer:
    """Return the answer. Raise WeightsError for None: gRPC gives it for unreadable bytes, or without an answer."""
    if answer is None:
        raise WeightsError("what was answered is no message of the weights service")
    return answer
