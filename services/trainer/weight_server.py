"""WeightsService over gRPC: serves the snapshots of one job's weight store to whoever pulls."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from onbeat.weights.client import CHANNEL_OPTIONS
from onbeat.weights.framing import CHUNK_BYTES
from onbeat.weights.v1 import weights_pb2, weights_pb2_grpc
from services.trainer.weight_store import Snapshot, WeightStore


class WeightServer(weights_pb2_grpc.WeightsServiceServicer):
    """Runs on the trainer's background event loop. `announce` may only be called on that loop."""

    def __init__(self, job_id: str, model_files: dict[str, bytes], store: WeightStore) -> None:
        self._job_id = job_id
        self._model_files = model_files
        self._store = store
        self._changed = asyncio.Condition()
        self._server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.max_send_message_length", 256 << 20)])
        weights_pb2_grpc.add_WeightsServiceServicer_to_server(self, self._server)

    async def start(self, host: str, port: int) -> int:
        """Returns the port, chosen by the system when 0 was asked for."""
        bound = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return bound

    async def announce(self) -> None:
        """Wake everybody who watches: the store has a newer version."""
        async with self._changed:
            self._changed.notify_all()

    async def stop(self) -> None:
        await self._server.stop(grace=1.0)

    async def Describe(self, request, context):
        await self._check_job(request, context)
        newest = await self._newest(context)
        files = [weights_pb2.File(name=name, content=content) for name, content in self._model_files.items()]
        version = newest.manifest.policy_version
        return weights_pb2.DescribeResponse(job_id=self._job_id, files=files, policy_version=version)

    async def GetManifest(self, request, context):
        await self._check_job(request, context)
        manifest = (await self._find(request.policy_version, context)).manifest
        tensors = [
            weights_pb2.Tensor(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                size_bytes=tensor.size_bytes,
                digest=tensor.digest,
            )
            for tensor in manifest.tensors
        ]
        version = manifest.policy_version
        return weights_pb2.GetManifestResponse(policy_version=version, tensors=tensors, digest=manifest.digest)

    async def Pull(self, request, context) -> AsyncIterator[weights_pb2.PullResponse]:
        await self._check_job(request, context)
        snapshot = await self._find(request.policy_version, context)
        for index, buffer in enumerate(snapshot.buffers):
            for offset in range(0, max(1, len(buffer)), CHUNK_BYTES):
                end = min(offset + CHUNK_BYTES, len(buffer))
                yield weights_pb2.PullResponse(
                    tensor_index=index,
                    encoding=weights_pb2.ENCODING_RAW,
                    offset_bytes=offset,
                    data=bytes(buffer[offset:end]),
                    is_last=end == len(buffer),
                )

    async def Watch(self, request, context) -> AsyncIterator[weights_pb2.WatchResponse]:
        await self._check_job(request, context)
        seen = -1
        while True:
            newest = self._store.newest()
            if newest is not None and newest.manifest.policy_version > seen:
                seen = newest.manifest.policy_version
                yield weights_pb2.WatchResponse(policy_version=seen, digest=newest.manifest.digest)
                continue
            async with self._changed:
                await self._changed.wait()

    async def _check_job(self, request, context) -> None:
        if request.job_id != self._job_id:
            detail = f"this trainer serves job {self._job_id}, not {request.job_id}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, detail)

    async def _newest(self, context) -> Snapshot:
        newest = self._store.newest()
        if newest is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no version is published yet; try again")
            raise AssertionError("abort raises")
        return newest

    async def _find(self, version: int, context) -> Snapshot:
        snapshot = self._store.get(version)
        if snapshot is None:
            detail = f"version {version} is not held here; held: {self._store.versions()}"
            await context.abort(grpc.StatusCode.NOT_FOUND, detail)
            raise AssertionError("abort raises")
        return snapshot
