"""Moving a host's weights from version to version: manifest -> locate -> receive and apply -> verify, tensor by tensor.

    receive   writes the payload's bytes as they come, from one source after another if need be
    apply     follows: patches or keeps each tensor whose bytes are there, checks it, says that it is final
    peers     follow too, and get the same bytes

A tensor is final when its digest is the manifest's, or, where every byte came from the trainer that also sent the
manifest, its checksum: engines may read it from then on. A version is held when all are.
What fails on the way of deltas is pulled in full; what no source gives is tried again until the deadline.
"""

import asyncio
import contextlib
import logging
import os
import time
from bisect import bisect_right
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3
from xxhash import xxh3_128_digest

from onbeat.errors import WeightsError
from onbeat.weights import delta
from onbeat.weights.client import Itinerary, ModelDescription, Peer, Source
from onbeat.weights.framing import DTYPE_BYTES, Manifest
from onbeat.weights.host import HostWeights, full_plan
from onbeat.weights.payload import Payload, PayloadKey, Plan

logger = logging.getLogger(__name__)

SHARED_CHUNK_BYTES = 16 << 20  # read at a time from another process on this machine
MAX_SOURCES = 8  # tried for one payload
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 3.0


class WeightsSource(Protocol):
    """What a pull needs of `WeightsClient`."""

    async def describe(self) -> ModelDescription: ...
    async def itinerary(self, version: int, base_version: int | None = None) -> Itinerary: ...
    async def locate(self, key: PayloadKey, puller: Peer, failed: Sequence[str]) -> Source: ...
    async def finish(self, key: PayloadKey, worker_id: str, is_complete: bool) -> None: ...
    def pull(self, key: PayloadKey, offset_bytes: int = 0) -> AsyncGenerator[Plan | memoryview, None]: ...
    def watch(self) -> AsyncIterator[int]: ...
    async def close(self) -> None: ...


class WrongBytes(WeightsError):
    """What came is not what the manifest says."""


class OtherWeights(WeightsError):
    """The trainer has started again and made the version anew; what was told of it before is void."""


@dataclass
class PullStats:
    full_bytes: int = 0  # of the version
    received_bytes: int = 0
    pull_s: float = 0.0  # from the manifest to the last verified tensor
    ended_at: float = 0.0  # time.monotonic() here of the last verified tensor
    apply_s: float = 0.0  # of it decoding and verifying
    sources: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # what went wrong and was cured


class Pull:
    """One move to a version, as others see it. Made by `WeightsMover.start`."""

    def __init__(self, version: int, deadline_s: float) -> None:
        self.version = version
        self.deadline = time.monotonic() + deadline_s  # no new try after that; may be put off
        self.manifest: Manifest | None = None  # once it is known
        self.stats = PullStats()
        self.final: set[int] = set()  # tensors whose bytes are the manifest's
        self.stepped_at = 0.0  # time.monotonic() here when the version's optimizer step began
        self._news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """The version is here, or `error` says why not."""
        assert self.task is not None
        return self.task.done()

    @property
    def error(self) -> BaseException | None:
        assert self.task is not None
        if not self.task.done():
            return None
        return WeightsError("the pull was cancelled") if self.task.cancelled() else self.task.exception()

    async def known(self) -> Manifest:
        """The version's manifest. Raises what ended the pull."""
        while self.manifest is None:
            await self._wait()
        return self.manifest

    async def arrivals(self, names: Iterable[str]) -> AsyncIterator[list[str]]:
        """These tensors, in batches, as they become final; ends with the pull. Raises what ended it."""
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
        """Until the version is here. Raises what ended the pull."""
        while not self.is_over:
            await self._wait()
        if self.error is not None:
            raise self.error

    async def over(self) -> None:
        """Until it is here or not to be had."""
        assert self.task is not None
        await asyncio.wait({self.task})

    async def cancel(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await self.over()

    def announce(self, final: Iterable[int] = ()) -> None:
        """Something is known now that was not."""
        self.final.update(final)
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _wait(self) -> None:
        """For news; whoever moves the weights has the deadlines."""
        if (error := self.error) is not None:
            raise error
        await self._news.wait()


class WeightsMover:
    """Owns the host's copy. One pull at a time: the caller starts the next when nobody reads the copy any more.

    `find_trainer` names the address of the trainer's rank 0; it is asked again before every try, because a restarted
    trainer has another one. `connect` makes a client of an address.
    """

    def __init__(
        self,
        connect: Callable[[str], WeightsSource],
        find_trainer: Callable[[], Awaitable[str]],
        peer: Peer,
        folder: Path,
    ) -> None:
        self.host: HostWeights | None = None
        self.address = peer.address  # where this host serves others, once it does
        self._peer = peer
        self._connect, self._find_trainer, self._folder = connect, find_trainer, folder
        self._clients: dict[str, WeightsSource] = {}
        self._background: set[asyncio.Task[None]] = set()

    def start(self, version: int, deadline_s: float, is_hopeless: Callable[[], bool] = lambda: False) -> Pull:
        """No new try after `deadline_s`, or when it is hopeless. The running pull, if any, has to be over."""
        pull = Pull(version, deadline_s)
        pull.task = asyncio.create_task(self._run(pull, is_hopeless), name=f"pull version {version}")
        pull.task.add_done_callback(lambda _: pull.announce())
        pull.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait for a prefetch
        return pull

    @property
    def peer(self) -> Peer:
        """What others are told of this host."""
        path = "" if self.host is None or not self._peer.shared_space else str(self.host.path)
        return replace(self._peer, address=self.address, shared_path=path)

    async def describe(self) -> ModelDescription:
        """The model without weights. One try; raises WeightsError."""
        address = await self._find_trainer()
        try:
            return await self.client(address).describe()
        except WeightsError:
            await self.drop_client(address)
            raise

    async def payload(self, key: PayloadKey) -> Payload | None:
        """See `server.Holder`."""
        return None if self.host is None else await self.host.payload(key)

    def versions(self) -> list[int]:
        return [] if self.host is None else self.host.versions()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Nobody waits for it; it ends with `close` at the latest."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        if self.host is not None:
            self.host.close()

    def client(self, address: str) -> WeightsSource:
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return self._clients[address]

    async def drop_client(self, address: str) -> None:
        if (client := self._clients.pop(address, None)) is not None:
            await client.close()

    # ---- one pull ----------------------------------------------------------------------------------------------------

    async def _run(self, pull: Pull, is_hopeless: Callable[[], bool]) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            address = ""
            try:
                address = await self._find_trainer()
                await self._move(pull, address)
                return
            except WeightsError as error:
                await self.drop_client(address)
                is_late = time.monotonic() + delay_s > pull.deadline
                if is_late or isinstance(error, OtherWeights) or is_hopeless():
                    raise
                pull.stats.faults.append(str(error))
                logger.warning("policy version %d is tried again: %s", pull.version, error)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, MAX_RETRY_S)

    async def _move(self, pull: Pull, address: str) -> None:
        host, trainer = self.host, self.client(address)
        started = time.monotonic()
        itinerary = await trainer.itinerary(pull.version, None if host is None else host.version)
        manifest = itinerary.manifest
        if pull.manifest is not None and pull.manifest.digest != manifest.digest:
            raise OtherWeights(f"{address}: version {pull.version} has other weights than when its pull began")
        if host is not None and host.layout.layout != manifest.layout:
            if host.has_held:
                raise WeightsError(f"{address}: version {pull.version} is of another model than the versions before it")
            host.close()  # nobody reads it: it was made for a version that never came
            host = self.host = None
        if host is None:
            try:
                host = self.host = HostWeights(manifest, self._folder)
            except WeightsError as error:
                raise WeightsError(f"{address}: {error}") from error
        held = host.manifest
        pull.stats.full_bytes = manifest.size_bytes
        pull.stepped_at = time.monotonic() - itinerary.age_s
        pull.manifest = manifest
        pull.announce()
        host.begin(f"version {pull.version} replaces it")
        host.layout = manifest  # the same tensors, maybe in other shards: the trainer may have other ranks now
        if held is None or held.digest != manifest.digest:
            await self._follow(pull, host, itinerary, held, trainer)
        else:
            pull.announce(range(len(manifest.tensors)))
        if len(pull.final) < len(manifest.tensors):
            raise WeightsError(f"the way to version {pull.version} that {address} named does not lead there")
        host.settle(manifest)
        pull.stats.ended_at = time.monotonic()
        pull.stats.pull_s = pull.stats.ended_at - started

    async def _follow(
        self, pull: Pull, host: HostWeights, itinerary: Itinerary, held: Manifest | None, trainer: WeightsSource
    ) -> None:
        """Step by step, the shards of a step side by side."""
        manifest = itinerary.manifest
        steps: list[tuple[int, int | None]] = [(step.policy_version, step.base_version) for step in itinerary.steps]
        if not steps or held is None:
            steps = [(pull.version, None)]
        touched: set[int] = set()
        relayed: set[int] = set()
        for version, base in steps:
            keys = [PayloadKey(version, base, shard) for shard in range(len(manifest.shards))]
            try:
                async with asyncio.TaskGroup() as tasks:
                    for key in keys:
                        tasks.create_task(ShardPull(self, pull, host, trainer, key, held, touched, relayed).run())
            except ExceptionGroup as group:
                raise group.exceptions[0] from None


class ShardPull:
    """One payload: from its sources to verified tensors.

    Shared with the other steps and shards: `touched`, the tensors that this or earlier steps changed; `relayed`, the
    shards that this or earlier steps have asked of anybody but the trainer that sent the manifest.
    """

    def __init__(
        self,
        mover: WeightsMover,
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
