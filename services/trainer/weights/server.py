"""The WeightsService over gRPC: it serves the versions of one job and assigns a source to each puller."""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc

from onbeat.weights.security import PLAIN, WireSecurity
from onbeat.weights.server import Context, PayloadServer
from onbeat.weights.v1 import weights_pb2
from onbeat.weights.wire import read_key
from services.trainer.weights.relay_tree import Sources
from services.trainer.weights.store import WeightStore


class WeightServer(PayloadServer):
    """A server on the trainer's background event loop. `announce` may only be called on that loop."""

    def __init__(
        self,
        job_id: str,
        model_files: dict[str, bytes],
        store: WeightStore,
        security: WireSecurity = PLAIN,
        max_concurrent_calls: int = 1024,
    ) -> None:
        super().__init__(job_id, store, security, max_concurrent_calls)
        self._model_files = model_files
        self._store = store
        self._changed = asyncio.Condition()
        self.sources = Sources([])  # nothing can be pulled until its owner sets who serves which shard

    async def announce(self) -> None:
        """Wake all watchers: the store has a newer version."""
        async with self._changed:
            self._changed.notify_all()

    async def Describe(self, request: weights_pb2.DescribeRequest, context: Context) -> weights_pb2.DescribeResponse:
        await self._check_job(request, context)
        newest = self._store.newest()
        if newest is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no version is published now; try again")
        files = [weights_pb2.File(name=name, content=content) for name, content in self._model_files.items()]
        version = newest.manifest.policy_version
        return weights_pb2.DescribeResponse(job_id=self._job_id, files=files, policy_version=version)

    async def GetManifest(
        self, request: weights_pb2.GetManifestRequest, context: Context
    ) -> weights_pb2.GetManifestResponse:
        await self._check_job(request, context)
        version, snapshot = request.policy_version, self._store.get(request.policy_version)
        if snapshot is None:
            detail = f"version {version} is not held here; held: {self._store.versions()}"
            await context.abort(grpc.StatusCode.NOT_FOUND, detail)
        manifest = snapshot.manifest
        return weights_pb2.GetManifestResponse(
            policy_version=version,
            tensors=manifest.tensors,
            digest=manifest.digest,
            shard_starts=manifest.shard_starts,
            steps=self._store.steps(request.base_version, version) if request.HasField("base_version") else (),
            age_s=time.monotonic() - snapshot.started_at,
        )

    async def Locate(self, request: weights_pb2.LocateRequest, context: Context) -> weights_pb2.LocateResponse:
        await self._check_job(request, context)
        key, puller = read_key(request.key), request.puller
        if key.shard >= self.sources.num_shards or not puller.worker_id:
            detail = f"nobody here serves {key} to {puller.worker_id[:80]!r}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, detail)
        address = self.sources.locate(key, puller, set(request.failed_addresses))
        return weights_pb2.LocateResponse(address=address)

    async def Finish(self, request: weights_pb2.FinishRequest, context: Context) -> weights_pb2.FinishResponse:
        await self._check_job(request, context)
        self.sources.finish(read_key(request.key), request.worker_id, request.is_complete)
        return weights_pb2.FinishResponse()

    async def Watch(
        self, request: weights_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[weights_pb2.WatchResponse]:
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
