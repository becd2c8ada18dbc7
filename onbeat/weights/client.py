"""Pulling policy weights: what a rollout, a relay or a tool needs to follow a job's policy.

A pull becomes visible only when it is complete and every digest is right; anything else raises and leaves nothing.
"""

import asyncio
import contextlib
import mmap
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from blake3 import blake3

from onbeat.errors import WeightsError
from onbeat.weights.framing import Manifest, TensorEntry, safetensors_header
from onbeat.weights.v1 import weights_pb2, weights_pb2_grpc

MESSAGE_DEADLINE_S = 30.0  # longest silence inside a pull
CALL_DEADLINE_S = 60.0  # of calls that answer once
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 256 << 20),  # a tokenizer can be tens of MB
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


@dataclass(frozen=True)
class ModelDescription:
    """Everything of a model but its weights."""

    files: dict[str, bytes]
    policy_version: int


@dataclass(frozen=True)
class PullStats:
    num_bytes: int  # received
    pull_s: float
    digest: bytes  # of the whole version


class WeightsClient:
    """One job's weights at one address (`host:port`)."""

    def __init__(self, address: str, job_id: str) -> None:
        self.address = address
        self.job_id = job_id
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = weights_pb2_grpc.WeightsServiceStub(self._channel)

    async def describe(self) -> ModelDescription:
        """Raises WeightsError when the server does not answer in time."""
        request = weights_pb2.DescribeRequest(job_id=self.job_id)
        with self._as_weights_error("describe the model"):
            answer = await self._stub.Describe(request, timeout=CALL_DEADLINE_S)
        return ModelDescription({file.name: file.content for file in answer.files}, answer.policy_version)

    async def manifest(self, version: int) -> Manifest:
        """Raises WeightsError when the version is not held or the manifest contradicts its own digest."""
        request = weights_pb2.GetManifestRequest(job_id=self.job_id, policy_version=version)
        with self._as_weights_error(f"get the manifest of version {version}"):
            answer = await self._stub.GetManifest(request, timeout=CALL_DEADLINE_S)
        tensors = tuple(
            TensorEntry(tensor.name, tensor.dtype, tuple(tensor.shape), tensor.size_bytes, tensor.digest)
            for tensor in answer.tensors
        )
        manifest = Manifest(version, tensors)
        if answer.policy_version != version or manifest.digest != answer.digest:
            raise WeightsError(f"{self.address} sent a manifest of version {version} that contradicts its digest")
        return manifest

    async def pull(self, version: int, target: Path) -> PullStats:
        """Write the version to `target` as safetensors, verified and atomically. Raises WeightsError."""
        started = time.monotonic()
        manifest = await self.manifest(version)
        partial = target.with_name(target.name + ".partial")
        try:
            await self._receive(manifest, partial)
            partial.rename(target)
        finally:
            partial.unlink(missing_ok=True)
        return PullStats(manifest.size_bytes, time.monotonic() - started, manifest.digest)

    async def _receive(self, manifest: Manifest, path: Path) -> None:
        request = weights_pb2.PullRequest(job_id=self.job_id, policy_version=manifest.policy_version)
        with (
            TensorFile(manifest, path) as file,
            self._as_weights_error(f"pull version {manifest.policy_version}"),
        ):
            stream = aiter(self._stub.Pull(request))
            while True:
                async with asyncio.timeout(MESSAGE_DEADLINE_S):
                    message = await anext(stream, None)
                if message is None:
                    break
                file.write(message)
            file.check_complete()

    async def watch(self) -> AsyncIterator[int]:
        """The current version, then each newer one. Raises WeightsError when the server is gone."""
        with self._as_weights_error("watch for versions"):
            async for answer in self._stub.Watch(weights_pb2.WatchRequest(job_id=self.job_id)):
                yield answer.policy_version

    async def close(self) -> None:
        await self._channel.close()

    @contextlib.contextmanager
    def _as_weights_error(self, doing: str) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as error:
            raise WeightsError(
                f"could not {doing} at {self.address}: {error.code().name}: {error.details()}"
            ) from error
        except TimeoutError as error:
            raise WeightsError(f"could not {doing} at {self.address}: silent for {MESSAGE_DEADLINE_S:.0f} s") from error


class TensorFile:
    """A safetensors file being written chunk by chunk; hashes what it writes, refuses what does not fit."""

    def __init__(self, manifest: Manifest, path: Path) -> None:
        self._manifest = manifest
        self._path = path
        header = safetensors_header(manifest)
        self._starts = []
        offset = len(header)
        for tensor in manifest.tensors:
            self._starts.append(offset)
            offset += tensor.size_bytes
        with path.open("wb") as file:
            file.write(header)
            file.truncate(offset)
        self._file = path.open("r+b")
        self._map = mmap.mmap(self._file.fileno(), 0)
        self._next_tensor = 0
        self._received = 0  # bytes of the tensor that is being received
        self._hash = blake3()

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self._map.close()
        self._file.close()

    def write(self, message: weights_pb2.PullResponse) -> None:
        """Place one chunk. Chunks come in manifest order; anything else raises WeightsError."""
        index, size = message.tensor_index, len(message.data)
        if index != self._next_tensor or index >= len(self._manifest.tensors):
            raise WeightsError(f"version {self._manifest.policy_version}: tensor {index} came out of order")
        tensor = self._manifest.tensors[index]
        if message.encoding != weights_pb2.ENCODING_RAW:
            raise WeightsError(f"{tensor.name}: encoding {message.encoding} is not known here; upgrade this side")
        if message.offset_bytes != self._received or self._received + size > tensor.size_bytes:
            raise WeightsError(f"{tensor.name}: a chunk does not fit at byte {message.offset_bytes}")
        start = self._starts[index] + self._received
        self._map[start : start + size] = message.data
        self._hash.update(message.data)
        self._received += size
        if message.is_last:
            self._finish(tensor)

    def _finish(self, tensor: TensorEntry) -> None:
        if self._received != tensor.size_bytes or self._hash.digest() != tensor.digest:
            raise WeightsError(f"{tensor.name}: the received bytes do not match the digest; nothing was applied")
        self._next_tensor += 1
        self._received = 0
        self._hash = blake3()

    def check_complete(self) -> None:
        if self._next_tensor != len(self._manifest.tensors):
            num = f"{self._next_tensor} of {len(self._manifest.tensors)}"
            raise WeightsError(f"version {self._manifest.policy_version}: the stream ended after {num} tensors")
