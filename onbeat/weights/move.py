"""One try to bring a host's copy to a version: its steps one after the other, the shards of each step side by side.

locate    the trainer names a source for the payload; another one whenever a source has failed
receive   writes the payload's bytes as they come
apply     follows: patches or keeps each tensor whose bytes are there, checks it, announces that it is final
peers     follow too, and get the same bytes
"""

import asyncio
import contextlib
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from blake3 import blake3
from xxhash import xxh3_128_digest

from onbeat.errors import WeightsError
from onbeat.weights import delta
from onbeat.weights.client import Step
from onbeat.weights.connections import Connections, WeightsSource
from onbeat.weights.framing import DTYPE_BYTES
from onbeat.weights.host import HostWeights
from onbeat.weights.payload import Payload, PayloadKey, Plan
from onbeat.weights.pull import Pull, WrongBytes

logger = logging.getLogger(__name__)

MAX_SOURCES = 8  # for one payload, before it is given up


@dataclass
class Part:
    """A payload of the move and its progress."""

    key: PayloadKey
    payload: Payload | None = None  # once its plan is here
    num_applied: int = 0  # entries of the plan
    applying: asyncio.Task[None] | None = None  # ends when it has caught up; never cancelled
    failed: list[str] = field(default_factory=list)  # sources


class Move:
    """A move to a version. The host still holds its current version when it is made, the base of the first step.

    A tensor that no step names is final if its digest was the same in that version. Others are checked in the last
    step: with the checksum if the shard came from the trainer only, otherwise with the digest.
    """

    def __init__(self, pull: Pull, host: HostWeights, trainer: WeightsSource, connections: Connections) -> None:
        assert pull.manifest is not None
        self._pull, self._manifest = pull, pull.manifest
        self._host, self._held = host, host.manifest
        self._trainer, self._connections = trainer, connections
        self._touched: set[int] = set()  # tensors that a step has changed
        self._relayed: set[int] = set()  # shards with a source other than the trainer

    async def run(self, steps: Sequence[Step]) -> None:
        """Take the steps, or pull the version in full if there are none.

        Raise WeightsError when no source delivers, WrongBytes when the deltas do not lead to the manifest.
        """
        if self._held is not None and self._held.digest == self._manifest.digest:
            self._pull.announce(range(len(self._manifest.tensors)))
            return
        way: list[tuple[int, int | None]] = [(step.policy_version, step.base_version) for step in steps]
        if not way or self._held is None:
            way = [(self._pull.version, None)]
        for version, base in way:
            try:
                async with asyncio.TaskGroup() as tasks:
                    for shard in range(len(self._manifest.shards)):
                        tasks.create_task(self._get(Part(PayloadKey(version, base, shard))))
            except ExceptionGroup as group:
                raise group.exceptions[0] from None

    async def _get(self, part: Part) -> None:
        """Pull the payload, from one source after another if need be, and apply it."""
        is_complete = False
        try:
            while not is_complete:
                source = await self._trainer.locate(part.key, self._connections.peer, part.failed)
                try:
                    await self._receive(part, source)
                    await self._catch_up(part)
                    self._pull.stats.sources.append(source)
                    is_complete = True
                except WeightsError as error:
                    await self._blame(part, source, error)
        finally:
            if part.applying is not None:
                await asyncio.wait({part.applying})
            if not is_complete:
                self._host.drop(part.key, "it could not be had here")
            elif self._is_last(part.key):
                self._host.offer(self._manifest, part.key.shard)
            self._connections.in_background(self._tell_finished(part.key, is_complete and self._is_last(part.key)))

    async def _blame(self, part: Part, source: str, error: WeightsError) -> None:
        """Prepare for another source. Raise the error again when another source would not help."""
        is_delta = part.key.base_version is not None
        is_wrong = isinstance(error, WrongBytes)
        if (is_wrong and is_delta) or source in part.failed or len(part.failed) == MAX_SOURCES:
            raise type(error)(f"{source}: {error}") from error
        if is_wrong:
            await self._start_over(part)
        part.failed.append(source)
        self._pull.stats.faults.append(f"{source}: {error}")
        logger.warning("%s: %s did not deliver, another source is asked for: %s", part.key, source, error)

    async def _start_over(self, part: Part) -> None:
        if part.applying is not None:  # it writes to the copy, too
            await asyncio.wait({part.applying})
        self._host.drop(part.key, "its bytes were wrong")
        part.payload, part.applying, part.num_applied = None, None, 0

    async def _tell_finished(self, key: PayloadKey, is_complete: bool) -> None:
        """Report to the trainer that the source is free for the next one. A lost report does no harm: slots expire."""
        try:
            await self._trainer.finish(key, self._connections.peer.worker_id, is_complete)
        except WeightsError as error:
            logger.debug("%s", error)

    def _is_last(self, key: PayloadKey) -> bool:
        """Return whether the payload leads to the version itself, and not to one on the way there."""
        return key.policy_version == self._pull.version

    # ---- receiving ---------------------------------------------------------------------------------------------------

    async def _receive(self, part: Part, source: str) -> None:
        """Write what the source sends, from where the previous source ended."""
        if self._connections.client(source) is not self._trainer:
            self._relayed.add(part.key.shard)  # set before its first byte, and never unset
        self._host.expect(part.key)
        async with contextlib.aclosing(self._stream(part, source)) as messages:
            async for message in messages:
                if isinstance(message, Plan):
                    self._open(part, message)
                else:
                    self._write(part, message)
                    self._start_applying(part)
        if part.payload is None or not part.payload.is_complete:
            got, size = (0, 0) if part.payload is None else (part.payload.available, part.payload.plan.size_bytes)
            raise WeightsError(f"the stream of {part.key} ended after {got} of {size} bytes")

    async def _stream(self, part: Part, source: str) -> AsyncGenerator[Plan | memoryview, None]:
        client = self._connections.client(source)
        offset = 0 if part.payload is None else part.payload.available
        try:
            async with contextlib.aclosing(client.pull(part.key, offset)) as messages:
                async for message in messages:
                    if not isinstance(message, Plan):
                        self._pull.stats.received_bytes += len(message)
                    yield message
        except WeightsError:
            if client is not self._trainer:
                await self._connections.drop(source)
            raise

    def _open(self, part: Part, plan: Plan) -> None:
        key = part.key
        if part.payload is not None:
            if part.payload.plan.entries != plan.entries:
                reason = f"{key} is another payload here than at the source before"
                raise WeightsError(reason) if key.base_version is None else WrongBytes(reason)
            return
        part.payload = self._host.open(key, plan)
        if self._is_last(part.key) and key.base_version is not None:
            planned = self._touched | {entry.tensor_index for entry in plan.entries}
            quiet = [index for index in self._manifest.shards[key.shard] if index not in planned]
            self._pull.announce(index for index in quiet if self._is_as_held(index))

    def _write(self, part: Part, data: memoryview) -> None:
        """Append to the payload. Tensors that are final already are not written: an engine may be reading them."""
        payload = part.payload
        if payload is None:
            raise WeightsError(f"{part.key}: data came before its plan")
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

    def _start_applying(self, part: Part) -> None:
        """Start the task unless it runs. Raise the error of the previous one."""
        if part.applying is None or part.applying.done():
            if part.applying is not None:
                part.applying.result()
            part.applying = asyncio.create_task(self._apply_available(part))
            # The next use of this payload raises the task's error; there is none when the stream has failed as well.
            part.applying.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _catch_up(self, part: Part) -> None:
        """Wait until all bytes are applied and checked. Raise WrongBytes."""
        self._start_applying(part)
        assert part.applying is not None
        await asyncio.wait({part.applying})
        self._start_applying(part)  # for bytes that came after its last look
        await part.applying
        if self._is_last(part.key):
            await asyncio.to_thread(self._check_rest, part.key.shard)
            self._pull.announce(self._manifest.shards[part.key.shard])

    async def _apply_available(self, part: Part) -> None:
        payload = part.payload
        assert payload is not None
        while (ready := bisect_right(payload.plan.starts, payload.available) - 1) > part.num_applied:
            started = time.monotonic()
            entries = payload.plan.entries[part.num_applied : ready]
            await asyncio.to_thread(self._apply, payload, part.num_applied, ready)
            part.num_applied = ready
            self._pull.stats.apply_s += time.monotonic() - started
            if self._is_last(part.key):
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
            if self._is_last(payload.key):
                self._check(entry.tensor_index, payload.key.shard)

    def _check_rest(self, shard: int) -> None:
        """Check the tensors that the last step did not name, unless they are unchanged since before the first step."""
        for index in self._manifest.shards[shard]:
            if index not in self._pull.final and not (index not in self._touched and self._is_as_held(index)):
                self._check(index, shard)

    def _is_as_held(self, index: int) -> bool:
        return self._held is not None and self._held.tensors[index].digest == self._manifest.tensors[index].digest

    def _check(self, index: int, shard: int) -> None:
        """Check one tensor; raise WrongBytes. For bytes from the trainer a checksum proves as much as a digest, since
        the trainer could send a matching digest for any bytes."""
        tensor, content = self._manifest.tensors[index], self._host.tensor(index)
        if tensor.checksum and shard not in self._relayed:
            kind, is_right = "checksum", xxh3_128_digest(content) == tensor.checksum
        else:
            kind, is_right = "digest", blake3(content, max_threads=blake3.AUTO).digest() == tensor.digest
        if not is_right:
            raise WrongBytes(f"{tensor.name} of version {self._manifest.policy_version} does not match its {kind}")
