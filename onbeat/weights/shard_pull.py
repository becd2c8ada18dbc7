"""One payload of a pull: from its sources to verified tensors.

receive   writes the payload's bytes as they come, from one source after another if need be
apply     follows: patches or keeps each tensor whose bytes are there, checks it, says that it is final
peers     follow too, and get the same bytes
"""

import asyncio
import contextlib
import logging
import os
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

from blake3 import blake3
from xxhash import xxh3_128_digest

from onbeat.errors import WeightsError
from onbeat.weights import delta
from onbeat.weights.client import Source
from onbeat.weights.framing import DTYPE_BYTES, Manifest
from onbeat.weights.host import HostWeights, full_plan
from onbeat.weights.payload import Payload, PayloadKey, Plan
from onbeat.weights.pull import Pull, WeightsSource, WrongBytes

if TYPE_CHECKING:
    from onbeat.weights.mover import WeightsMover

logger = logging.getLogger(__name__)

SHARED_CHUNK_BYTES = 16 << 20  # read at a time from another process on this machine
MAX_SOURCES = 8  # tried for one payload


class ShardPull:
    """One payload: from its sources to verified tensors.

    Shared with the other steps and shards: `touched`, the tensors that this or earlier steps changed; `relayed`, the
    shards that this or earlier steps have asked of anybody but the trainer that sent the manifest.
    """

    def __init__(
        self,
        mover: "WeightsMover",
        pull: Pull,
        host: HostWeights,
        trainer: WeightsSource,
        key: PayloadKey,
        held: Manifest | None,
        touched: set[int],
        relayed: set[int],
    ) -> None:
        assert pull.manifest is not None
        self._mover, self._pull, self._host, self._trainer = mover, pull, host, trainer
        self._wanted, self._manifest, self._held = key, pull.manifest, held
        self._touched, self._relayed = touched, relayed
        self._is_last = key.policy_version == pull.version
        self._payload: Payload | None = None
        self._num_applied = 0  # entries of the plan
        self._applying: asyncio.Task[None] | None = None  # ends when it has caught up; never cancelled

    async def run(self) -> None:
        """Raises WeightsError when no source delivers, WrongBytes when a delta does not lead to the manifest."""
        failed: list[str] = []
        is_complete = False
        try:
            while not is_complete:
                source = await self._trainer.locate(self._wanted, self._mover.peer, failed)
                try:
                    await self._pull_from(source)
                    is_complete = True
                except WeightsError as error:
                    await self._blame(source, error, failed)
        finally:
            if self._applying is not None:
                await asyncio.wait({self._applying})
            if not is_complete:
                self._host.drop(self._wanted, "it could not be had here")
            elif self._is_last:
                self._host.offer(self._manifest, self._wanted.shard)
            self._mover.in_background(self._tell_finished(is_complete and self._is_last))

    async def _blame(self, source: Source, error: WeightsError, failed: list[str]) -> None:
        """Raises the error again when another source would not help."""
        is_delta = self._wanted.base_version is not None
        is_wrong = isinstance(error, WrongBytes)
        if (is_wrong and is_delta) or source.address in failed or len(failed) == MAX_SOURCES:
            raise type(error)(f"{source.address}: {error}") from error
        if is_wrong:
            await self._start_over("its bytes were wrong")
        failed.append(source.address)
        self._pull.stats.faults.append(f"{source.address}: {error}")
        logger.warning("%s: %s did not deliver, another source is asked for: %s", self._wanted, source.address, error)

    async def _pull_from(self, source: Source) -> None:
        if source.shared_path or self._mover.client(source.address) is not self._trainer:
            self._relayed.add(self._wanted.shard)  # before its first byte, and for good
        key = replace(self._wanted, base_version=None) if source.shared_path else self._wanted
        self._host.expect(self._wanted)
        offset = 0 if self._payload is None else self._payload.available
        messages = self._read_shared(source, key) if source.shared_path else self._stream(source, key, offset)
        async with contextlib.aclosing(messages):
            async for message in messages:
                if isinstance(message, Plan):
                    await self._open(key, message)
                else:
                    self._write(message)
                    self._start_applying()
        if self._payload is None or not self._payload.is_complete:
            got, size = (0, 0) if self._payload is None else (self._payload.available, self._payload.plan.size_bytes)
            raise WeightsError(f"the stream of {key} ended after {got} of {size} bytes")
        await self._catch_up()
        self._pull.stats.sources.append(source.address)

    async def _stream(self, source: Source, key: PayloadKey, offset: int) -> AsyncGenerator[Plan | memoryview, None]:
        client = self._mover.client(source.address)
        try:
            async with contextlib.aclosing(client.pull(key, offset)) as messages:
                async for message in messages:
                    if not isinstance(message, Plan):
                        self._pull.stats.received_bytes += len(message)
                    yield message
        except WeightsError:
            if client is not self._trainer:
                await self._mover.drop_client(source.address)
            raise

    async def _read_shared(self, source: Source, key: PayloadKey) -> AsyncGenerator[Plan | memoryview, None]:
        """The copy that another process of this machine holds. It may move while it is read: the digests tell."""
        host = self._host
        tensors = self._manifest.shards[key.shard]
        start, end = (
            len(host.header) + host.layout.starts[tensors.start],
            len(host.header) + host.layout.starts[tensors.stop],
        )
        try:
            # Memory, not a disk; and what another worker names may be anything, even what never answers.
            with open(os.open(source.shared_path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # noqa: ASYNC230
                if file.read(len(host.header)) != host.header:
                    raise WeightsError(f"{source.shared_path} holds another model")
                yield full_plan(self._manifest, key.shard)
                assert self._payload is not None
                done = self._payload.available
                file.seek(start + done)
                while start + done < end:
                    chunk = file.read(min(SHARED_CHUNK_BYTES, end - start - done))
                    if not chunk:
                        raise WeightsError(f"{source.shared_path} is too short")
                    done += len(chunk)
                    yield memoryview(chunk)
                    await asyncio.sleep(0)
        except (OSError, ValueError) as error:  # ValueError: a path that can be none
            raise WeightsError(f"cannot read the weights that {source.address} shares: {error}") from error

    async def _open(self, key: PayloadKey, plan: Plan) -> None:
        if key != self._wanted:  # in full after all; what it is written over is no base any more
            await self._start_over("it is read from this machine")
            self._wanted = key
            self._host.expect(key)
        if self._payload is not None:
            if self._payload.plan.entries != plan.entries:
                reason = f"{key} is another payload here than at the source before"
                raise WeightsError(reason) if key.base_version is None else WrongBytes(reason)
            return
        self._payload = self._host.open(key, plan)
        if self._is_last and self._held is not None and key.base_version is not None:
            planned = self._touched | {entry.tensor_index for entry in plan.entries}
            quiet = [index for index in self._manifest.shards[key.shard] if index not in planned]
            self._pull.announce(index for index in quiet if self._is_as_held(index))

    def _write(self, data: memoryview) -> None:
        """The payload goes on. What is final already is not touched: an engine may be reading it."""
        payload = self._payload
        if payload is None:
            raise WeightsError(f"{self._wanted}: data came before its plan")
        start, end = payload.available, payload.available + len(data)
        if end > payload.plan.size_bytes:
            raise WeightsError(f"{payload.key}: {end} bytes came of {payload.plan.size_bytes}")
        if payload.key.base_version is None and self._pull.final:
            self._write_missing(payload, data)
        else:
            payload.slices(start, end)[0][:] = data
        payload.advance(end)

    def _write_missing(self, payload: Payload, data: memoryview) -> None:
        start, starts = payload.available, payload.plan.starts
        position, end = start, start + len(data)
        while position < end:
            index = bisect_right(starts, position) - 1
            stop = min(end, starts[index + 1])
            if payload.plan.entries[index].tensor_index not in self._pull.final:
                payload.slices(position, stop)[0][:] = data[position - start : stop - start]
            position = stop

    # ---- applying ----------------------------------------------------------------------------------------------------

    def _start_applying(self) -> None:
        """Unless somebody is at it. Raises what was wrong so far."""
        if self._applying is None or self._applying.done():
            if self._applying is not None:
                self._applying.result()
            self._applying = asyncio.create_task(self._apply_available())
            # Whoever goes on with this payload raises its error; nobody does when the stream has failed as well.
            self._applying.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _catch_up(self) -> None:
        """Until everything that is there is applied. Raises WrongBytes, also for what never came."""
        self._start_applying()
        assert self._applying is not None
        await asyncio.wait({self._applying})
        self._start_applying()  # what came after it had looked for the last time
        await self._applying
        if self._payload is not None and self._payload.is_complete and self._is_last:
            await asyncio.to_thread(self._check_rest)
            self._pull.announce(self._manifest.shards[self._wanted.shard])

    async def _apply_available(self) -> None:
        payload = self._payload
        if payload is None:
            return
        while (ready := bisect_right(payload.plan.starts, payload.available) - 1) > self._num_applied:
            started = time.monotonic()
            entries = payload.plan.entries[self._num_applied : ready]
            await asyncio.to_thread(self._apply, payload, self._num_applied, ready)
            self._num_applied = ready
            self._pull.stats.apply_s += time.monotonic() - started
            if self._is_last:
                self._pull.announce(entry.tensor_index for entry in entries)

    def _apply(self, payload: Payload, first: int, end: int) -> None:
        for position in range(first, end):
            entry = payload.plan.entries[position]
            tensor = self._manifest.tensors[entry.tensor_index]
            if payload.key.base_version is not None:
                encoded = b"".join(payload.slices(payload.plan.starts[position], payload.plan.starts[position + 1]))
                target = self._host.tensor(entry.tensor_index)
                try:
                    delta.apply(entry.encoding, encoded, target, DTYPE_BYTES[tensor.dtype])
                except WeightsError as error:
                    raise WrongBytes(f"{payload.key}: {tensor.name}: {error}") from error
            self._touched.add(entry.tensor_index)
            if self._is_last:
                self._check(entry.tensor_index)

    def _check_rest(self) -> None:
        """The tensors that the last step did not name: as before, or changed by an earlier step."""
        for index in self._manifest.shards[self._wanted.shard]:
            if index not in self._pull.final and not (index not in self._touched and self._is_as_held(index)):
                self._check(index)

    def _is_as_held(self, index: int) -> bool:
        return self._held is not None and self._held.tensors[index].digest == self._manifest.tensors[index].digest

    def _check(self, index: int) -> None:
        """The trainer could name a digest for any bytes that it sends, so of these the cheap checksum says as much."""
        tensor, content = self._manifest.tensors[index], self._host.tensor(index)
        if tensor.checksum and self._wanted.shard not in self._relayed:
            kind, is_right = "checksum", xxh3_128_digest(content) == tensor.checksum
        else:
            kind, is_right = "digest", blake3(content, max_threads=blake3.AUTO).digest() == tensor.digest
        if not is_right:
            raise WrongBytes(f"{tensor.name} of version {self._manifest.policy_version} does not match its {kind}")

    async def _start_over(self, reason: str) -> None:
        if self._applying is not None:  # it writes to the copy, too
            await asyncio.wait({self._applying})
        self._host.drop(self._wanted, reason)
        self._payload, self._applying, self._num_applied = None, None, 0

    async def _tell_finished(self, is_complete: bool) -> None:
        """So that the source is free for the next one. Nothing depends on it: slots run out by themselves."""
        try:
            await self._trainer.finish(self._wanted, self._mover.peer.worker_id, is_complete)
        except WeightsError as error:
            logger.debug("%s", error)
