"""A pull: the move of a host's copy to one version, and what those that wait for it see.

    Pull.attempt   one try: the deltas on the way one after the other, the shards of each side by side
      a shard      the trainer names a source for its payload; another one whenever a source has failed
        receive    writes the payload's bytes as they come; peers that pull from here get them, too
        apply      follows: patches or keeps each tensor whose bytes are there, checks it, announces that it is final

A tensor is final when its digest is the manifest's, or, where every byte came from the trainer that also sent the
manifest, its checksum: engines may read it from then on. A version is held when all its tensors are final.
"""

import asyncio
import contextlib
import logging
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field, replace

from blake3 import blake3
from xxhash import xxh3_128_digest

from onbeat.errors import WeightsError
from onbeat.weights import delta
from onbeat.weights.client import Connections, Itinerary, WeightsClient
from onbeat.weights.host import HostWeights
from onbeat.weights.server import Payload
from onbeat.weights.wire import DTYPE_BYTES, Manifest, PayloadKey, Plan

logger = logging.getLogger(__name__)

MAX_SOURCES = 8  # for one payload, before it is given up


class WrongBytes(WeightsError):
    """The received bytes do not match the manifest."""


@dataclass
class PullStats:
    full_bytes: int = 0  # of the version
    received_bytes: int = 0
    pull_s: float = 0.0  # from the manifest to the last verified tensor
    stepped_at: float = 0.0  # time.monotonic() here when the version's optimizer step began
    ended_at: float = 0.0  # time.monotonic() here of the last verified tensor
    apply_s: float = 0.0  # decoding and verifying, summed over shards
    sources: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # problems that were overcome


@dataclass
class Part:
    """A payload of the pull and its progress."""

    key: PayloadKey
    payload: Payload | None = None  # once its plan is here
    num_applied: int = 0  # entries of the plan
    applying: asyncio.Task[None] | None = None  # ends when it has caught up; never cancelled
    failed: list[str] = field(default_factory=list)  # sources


class Pull:
    """The move to one version, in one try or several. `WeightsPuller.start` makes it, and `task` runs the tries."""

    # Of the try that runs:
    _host: HostWeights
    _trainer: WeightsClient
    _as_held: set[int]  # tensors that no step has changed yet, and that need no change: the base had the same digest
    _relayed: set[int]  # shards with a source other than the trainer

    def __init__(self, version: int, deadline_s: float, connections: Connections) -> None:
        self.version = version
        self.deadline = time.monotonic() + deadline_s  # there is no new try after it; may be put off
        self.manifest: Manifest | None = None  # once it is known
        self.stats = PullStats()
        self.final: set[int] = set()  # tensors whose bytes are the manifest's
        self.task: asyncio.Task[None] | None = None
        self._connections = connections
        self._news = asyncio.Event()

    # ---- for those that wait -----------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the pull has ended: the version is here, or `error` is the reason why not."""
        assert self.task is not None
        return self.task.done()

    @property
    def error(self) -> BaseException | None:
        assert self.task is not None
        if not self.task.done():
            return None
        return WeightsError("the pull was cancelled") if self.task.cancelled() else self.task.exception()

    async def known(self) -> Manifest:
        """Return the version's manifest once it is known. Raise the error that ended the pull."""
        while self.manifest is None:
            await self._wait()
        return self.manifest

    async def arrivals(self, names: Iterable[str]) -> AsyncIterator[list[str]]:
        """Yield these tensors, in batches, as they become final; end with the pull. Raise the error that ended it."""
        manifest = await self.known()
        wanted = set(names)
        missing = {index for index, tensor in enumerate(manifest.tensors) if tensor.name in wanted}
        while missing:
            if arrived := missing & self.final:
                missing -= arrived
                yield [manifest.tensors[index].name for index in sorted(arrived)]
            else:
                await self._wait()
        await self.complete()

    async def complete(self) -> None:
        """Wait until the version is here. Raise the error that ended the pull."""
        while not self.is_over:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def over(self) -> None:
        """Wait until the pull has ended, with or without success."""
        assert self.task is not None
        await asyncio.wait({self.task})

    async def cancel(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await self.over()

    def announce(self, final: Iterable[int] = ()) -> None:
        """Wake the waiters: these tensors are final, or something else has changed."""
        self.final.update(final)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _wait(self) -> None:
        """Wait for news. Deadlines are up to the puller."""
        if (error := self.error) is not None:
            raise error
        await self._news.wait()

    # ---- one try -----------------------------------------------------------------------------------------------------

    async def attempt(self, itinerary: Itinerary, host: HostWeights, trainer: WeightsClient) -> None:
        """Move the copy on `host` to the version: by the deltas of the itinerary, or in full if there are none.

        Raise WeightsError when no source delivers, WrongBytes when the deltas do not lead to the manifest; the copy
        holds no version then.
        """
        manifest, held = itinerary.manifest, host.manifest
        self.manifest, self._host, self._trainer, self._relayed = manifest, host, trainer, set()
        pairs = enumerate(zip(held.tensors if held else (), manifest.tensors, strict=False))
        self._as_held = {index for index, (old, new) in pairs if old.digest == new.digest}
        self.stats.full_bytes = manifest.size_bytes
        self.stats.stepped_at = time.monotonic() - itinerary.age_s
        self.announce()
        host.begin(f"version {self.version} replaces it")
        host.layout = manifest  # the same tensors, maybe in other shards: the number of ranks may differ now
        if len(self._as_held) == len(manifest.tensors):
            self.announce(self._as_held)
        else:
            deltas = [PayloadKey(step.policy_version, step.base_version) for step in itinerary.steps if held]
            for key in deltas or [PayloadKey(self.version)]:
                await self._take_step(key)
        if len(self.final) < len(manifest.tensors):
            raise WeightsError(f"the way to version {self.version} that {trainer.address} named does not lead there")
        host.settle(manifest)

    async def _take_step(self, key: PayloadKey) -> None:
        """Get all shards of the payload."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for shard in range(len(self._host.layout.shards)):
                    tasks.create_task(self._get(Part(replace(key, shard=shard))))
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
                    self.stats.sources.append(source)
                    is_complete = True
                except WeightsError as error:
                    await self._blame(part, source, error)
        finally:
            if part.applying is not None:
                await asyncio.wait({part.applying})
            if not is_complete:
                self._host.drop(part.key, "it could not be had here")
            elif self._is_last(part.key):
                self._host.offer(self._host.layout, part.key.shard)
            self._connections.in_background(self._report_finished(part.key, is_complete and self._is_last(part.key)))

    async def _blame(self, part: Part, source: str, error: WeightsError) -> None:
        """Prepare for another source. Raise the error again when another source would not help."""
        is_delta = part.key.base_version is not None
        is_wrong = isinstance(error, WrongBytes)
        if (is_wrong and is_delta) or source in part.failed or len(part.failed) == MAX_SOURCES:
            raise type(error)(f"{source}: {error}") from error
        if is_wrong:
            await self._start_over(part)
        part.failed.append(source)
        self.stats.faults.append(f"{source}: {error}")
        logger.warning("%s: %s did not deliver, another source is asked for: %s", part.key, source, error)

    async def _start_over(self, part: Part) -> None:
        if part.applying is not None:  # it writes to the copy, too
            await asyncio.wait({part.applying})
        self._host.drop(part.key, "its bytes were wrong")
        part.payload, part.applying, part.num_applied = None, None, 0

    async def _report_finished(self, key: PayloadKey, is_complete: bool) -> None:
        """Report to the trainer that the source is free for the next one. A lost report does no harm: slots expire."""
        try:
            await self._trainer.finish(key, self._connections.peer.worker_id, is_complete)
        except WeightsError as error:
            logger.debug("%s", error)

    def _is_last(self, key: PayloadKey) -> bool:
        """Return whether the payload leads to the version itself, and not to one on the way there."""
        return key.policy_version == self.version

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
                        self.stats.received_bytes += len(message)
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
            planned = {entry.tensor_index for entry in plan.entries}
            shard = self._host.layout.shards[key.shard]
            self.announce(index for index in shard if index in self._as_held and index not in planned)

    def _write(self, part: Part, data: memoryview) -> None:
        """Append to the payload. Tensors that are final already are not written: an engine may be reading them."""
        payload = part.payload
        if payload is None:
            raise WeightsError(f"{part.key}: data came before its plan")
        start, end = payload.available, payload.available + len(data)
        if end > payload.plan.size_bytes:
            raise WeightsError(f"{payload.key}: {end} bytes came of {payload.plan.size_bytes}")
        if payload.key.base_version is None and self.final:
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
            if payload.plan.entries[index].tensor_index not in self.final:
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
            self.announce(self._host.layout.shards[part.key.shard])

    async def _apply_available(self, part: Part) -> None:
        payload = part.payload
        assert payload is not None
        while (ready := bisect_right(payload.plan.starts, payload.available) - 1) > part.num_applied:
            started = time.monotonic()
            entries = payload.plan.entries[part.num_applied : ready]
            await asyncio.to_thread(self._apply, payload, part.num_applied, ready)
            part.num_applied = ready
            self.stats.apply_s += time.monotonic() - started
            if self._is_last(part.key):
                self.announce(entry.tensor_index for entry in entries)

    def _apply(self, payload: Payload, first: int, end: int) -> None:
        for position in range(first, end):
            entry = payload.plan.entries[position]
            tensor = self._host.layout.tensors[entry.tensor_index]
            if payload.key.base_version is not None:
                encoded = b"".join(payload.slices(payload.plan.starts[position], payload.plan.starts[position + 1]))
                target = self._host.tensor(entry.tensor_index)
                try:
                    delta.apply(entry.encoding, encoded, target, DTYPE_BYTES[tensor.dtype])
                except WeightsError as error:
                    raise WrongBytes(f"{payload.key}: {tensor.name}: {error}") from error
            self._as_held.discard(entry.tensor_index)
            if self._is_last(payload.key):
                self._check(entry.tensor_index, payload.key.shard)

    def _check_rest(self, shard: int) -> None:
        """Check the tensors that the last step did not name, unless they are unchanged since before the first step."""
        for index in self._host.layout.shards[shard]:
            if index not in self.final and index not in self._as_held:
                self._check(index, shard)

    def _check(self, index: int, shard: int) -> None:
        """Check one tensor; raise WrongBytes. For bytes from the trainer a checksum proves as much as a digest, since
        the trainer could send a matching digest for any bytes."""
        tensor, content = self._host.layout.tensors[index], self._host.tensor(index)
        if tensor.checksum and shard not in self._relayed:
            kind, is_right = "checksum", xxh3_128_digest(content) == tensor.checksum
        else:
            kind, is_right = "digest", blake3(content, max_threads=blake3.AUTO).digest() == tensor.digest
        if not is_right:
            raise WrongBytes(f"{tensor.name} of version {self._host.layout.policy_version} does not match its {kind}")
