"""A pull: the move of a host's copy to one version, and what those that wait for it see.

    Pull           the version, its waiters, and which tensors are final, over all tries
    Attempt        one try: the deltas on the way one after the other, the shards of each side by side
    PayloadPull    a shard of one step: the trainer names a source for its payload; another one if a source fails
        receive    writes the payload's bytes as they come; peers that pull from here get them, too
        apply      follows: patches or keeps each tensor whose bytes are there, checks it, announces that it is final

A tensor is final when its digest is the manifest's: engines may read it from then on. If no ledger has the digest, and
every byte came from the process that also sent the manifest, its checksum proves as much. A version is held when all
its tensors are final.
"""

import asyncio
import contextlib
import logging
import math
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field, replace

from blake3 import blake3
from xxhash import xxh3_128_digest

from onbeat.contracts.errors import WeightsError
from onbeat.weights import delta
from onbeat.weights.client import Connections, Itinerary, WeightsClient
from onbeat.weights.host import HostWeights
from onbeat.weights.server import Payload
from onbeat.weights.wire import DTYPE_BYTES, Manifest, PayloadKey, Plan

logger = logging.getLogger(__name__)

MAX_SOURCES = 8  # sources for one payload, before it is given up
# A first source is left if it would take longer than this for a payload, the next one if it would take twice as long,
# and so on: one slow source costs little time, and a slow link here is not blamed on all sources.
SLOWEST_PULL_S = 3600.0
# Bytes of tensors that are applied at a time: engines load them while the next ones are applied.
APPLY_BYTES = 16 << 20


class WrongBytes(WeightsError):
    """The received bytes do not match the manifest."""


@dataclass
class PullStats:
    full_bytes: int = 0  # bytes of the version
    received_bytes: int = 0
    pull_s: float = 0.0  # seconds from the manifest to the last verified tensor
    stepped_at: float = 0.0  # time.monotonic() here when the version's optimizer step began
    ended_at: float = 0.0  # time.monotonic() here of the last verified tensor
    apply_s: float = 0.0  # decoding and verifying, summed over shards
    sources: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # problems that were overcome


class Pull:
    """The move to one version, in one try or several. `WeightsPuller.start` makes it, and `task` runs the tries."""

    def __init__(self, version: int, deadline_s: float) -> None:
        self.version = version
        self.deadline = time.monotonic() + deadline_s  # there is no new try after it; may be put off
        self.manifest: Manifest | None = None  # once it is known
        self.stats = PullStats()
        self.final: set[int] = set()  # tensors whose bytes are the manifest's
        self.task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    # ---- for those that wait -----------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if the pull has ended: the version is here, or `error` is the reason why not."""
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
        await self.over()
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


class Attempt:
    """One try of a pull: from what the host holds to the version."""

    def __init__(
        self,
        pull: Pull,
        host: HostWeights,
        trainer: WeightsClient,
        connections: Connections,
        *,
        is_in_ledger: bool = False,
    ) -> None:
        """Prepare a try. `is_in_ledger`: the manifest's digest is known from elsewhere than the trainer's address."""
        self.pull, self.host, self.trainer, self.connections = pull, host, trainer, connections
        # Tensors that no step has changed yet, and that need no change: the base had the same digest.
        self.as_held: set[int] = set()
        self.is_in_ledger = is_in_ledger
        self.relayed: set[int] = set()  # shards with a source other than the trainer

    async def run(self, itinerary: Itinerary) -> None:
        """Move the copy on `host` to the version: by the deltas of the itinerary, or in full if there are none.

        Raise WeightsError when no source delivers, WrongBytes when the deltas do not lead to the manifest; the copy
        holds no version then.
        """
        pull, host, manifest, held = self.pull, self.host, itinerary.manifest, self.host.manifest
        pull.manifest = manifest
        pull.stats.full_bytes = manifest.size_bytes
        pull.stats.stepped_at = time.monotonic() - itinerary.age_s
        pull.announce()
        pairs = enumerate(zip(held.tensors if held else (), manifest.tensors, strict=False))
        self.as_held = {index for index, (old, new) in pairs if old.digest == new.digest}
        host.begin(f"version {pull.version} replaces it")
        host.layout = manifest  # the same tensors, maybe in other shards: the number of ranks may differ now
        if len(self.as_held) == len(manifest.tensors):
            pull.announce(self.as_held)
        else:
            deltas = [PayloadKey(step.policy_version, step.base_version) for step in itinerary.steps if held]
            for key in deltas or [PayloadKey(pull.version)]:
                await self._take_step(key)
        if len(pull.final) < len(manifest.tensors):
            raise WeightsError(f"the way to version {pull.version} that {self.trainer.address} named leads elsewhere")
        host.settle(manifest)

    async def _take_step(self, key: PayloadKey) -> None:
        """Get all shards of the payload."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for shard in range(len(self.host.layout.shards)):
                    tasks.create_task(PayloadPull(self, replace(key, shard=shard)).run())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    def check_rest(self, shard: int) -> None:
        """Check the tensors that the last step did not name, unless they are unchanged since before the first step."""
        for index in self.host.layout.shards[shard]:
            if index not in self.pull.final and index not in self.as_held:
                self.check(index, shard)

    def check(self, index: int, shard: int) -> None:
        """Check one tensor; raise WrongBytes. Without a ledger, a checksum proves as much as a digest for bytes from
        the trainer, since it could send a matching digest for any bytes."""
        tensor, content = self.host.layout.tensors[index], self.host.tensor(index)
        if tensor.checksum and shard not in self.relayed and not self.is_in_ledger:
            kind, is_right = "checksum", xxh3_128_digest(content) == tensor.checksum
        else:
            kind, is_right = "digest", blake3(content, max_threads=blake3.AUTO).digest() == tensor.digest
        if not is_right:
            raise WrongBytes(f"{tensor.name} of version {self.host.layout.policy_version} does not match its {kind}")

    async def report_finished(self, key: PayloadKey, is_complete: bool) -> None:
        """Report to the trainer that the source is free for the next one. A lost report does no harm: slots expire."""
        try:
            await self.trainer.finish(key, self.connections.peer.worker_id, is_complete)
        except WeightsError as error:
            logger.debug("%s", error)


class PayloadPull:
    """The pull of one payload in an attempt: a shard of the whole version, or of a delta on the way to it."""

    def __init__(self, attempt: Attempt, key: PayloadKey) -> None:
        self._attempt, self._pull, self._host, self._key = attempt, attempt.pull, attempt.host, key
        self._is_last = key.policy_version == attempt.pull.version  # leads to the version itself
        self._payload: Payload | None = None  # once its plan is here
        self._applying: asyncio.Task[None] | None = None  # follows the payload to its end; never cancelled
        self._failed: list[str] = []  # sources

    async def run(self) -> None:
        """Pull the payload, from one source after another if need be, and apply it."""
        is_complete = False
        try:
            while not is_complete:
                source = await self._attempt.trainer.locate(self._key, self._attempt.connections.peer, self._failed)
                try:
                    await self._receive(source)
                    self._pull.stats.sources.append(source)
                    is_complete = True
                except WeightsError as error:
                    await self._blame(source, error)
        finally:
            if not is_complete:
                await self._give_up("it could not be had here")
            elif self._is_last:
                self._host.offer(self._host.layout, self._key.shard)
            report = self._attempt.report_finished(self._key, is_complete and self._is_last)
            self._attempt.connections.in_background(report)

    async def _blame(self, source: str, error: WeightsError) -> None:
        """Prepare for another source. Raise the error again when another source would not help."""
        is_delta = self._key.base_version is not None
        is_wrong = isinstance(error, WrongBytes)
        if (is_wrong and is_delta) or source in self._failed or len(self._failed) == MAX_SOURCES:
            raise type(error)(f"{source}: {error}") from error
        if is_wrong:
            await self._give_up("its bytes were wrong")
        self._failed.append(source)
        self._pull.stats.faults.append(f"{source}: {error}")
        logger.warning("%s: %s did not deliver, another source is asked for: %s", self._key, source, error)

    async def _give_up(self, reason: str) -> None:
        self._host.drop(self._key, reason)
        if self._applying is not None:  # it writes to the copy, and ends now
            await asyncio.wait({self._applying})
        self._payload = self._applying = None

    # ---- receiving ---------------------------------------------------------------------------------------------------

    async def _receive(self, source: str) -> None:
        """Write what the source sends, from where the previous source ended, until all is applied and checked.

        Raise WrongBytes, or WeightsError when the source does not deliver.
        """
        client = self._attempt.connections.client(source)
        is_relay = client is not self._attempt.trainer
        if is_relay:
            self._attempt.relayed.add(self._key.shard)  # set before its first byte, and never unset
        self._host.expect(self._key)
        offset = 0 if self._payload is None else self._payload.available
        has_others = source not in self._failed
        slowest_s = SLOWEST_PULL_S * 2 ** len(self._failed) if has_others else math.inf
        try:
            async with contextlib.aclosing(client.pull(self._key, offset, slowest_s)) as messages:
                async for message in messages:
                    if isinstance(message, Plan):
                        self._open(message)
                    else:
                        self._pull.stats.received_bytes += len(message)
                        self._write(message)
                        if self._applying is not None and self._applying.done():
                            self._applying.result()
        except WeightsError as error:
            if is_relay and not isinstance(error, WrongBytes):
                await self._attempt.connections.drop(source)
            raise
        if self._payload is None or not self._payload.is_complete:
            got, size = (0, 0) if self._payload is None else (self._payload.available, self._payload.plan.size_bytes)
            raise WeightsError(f"the stream of {self._key} ended after {got} of {size} bytes")
        assert self._applying is not None
        await asyncio.wait({self._applying})
        self._applying.result()

    def _open(self, plan: Plan) -> None:
        key = self._key
        if self._payload is not None:
            if self._payload.plan.entries != plan.entries:
                reason = f"{key} is another payload here than at the source before"
                raise WeightsError(reason) if key.base_version is None else WrongBytes(reason)
            return
        self._payload = self._host.open(key, plan)
        self._applying = asyncio.create_task(self._apply_all(self._payload))
        # `_receive` raises the task's error, unless the stream has failed as well.
        self._applying.add_done_callback(lambda task: task.cancelled() or task.exception())
        if self._is_last and key.base_version is not None:
            planned = {entry.tensor_index for entry in plan.entries}
            shard = self._host.layout.shards[key.shard]
            self._pull.announce(index for index in shard if index in self._attempt.as_held and index not in planned)

    def _write(self, data: memoryview) -> None:
        """Append to the payload. Tensors that are final already are not written: an engine may be reading them."""
        payload = self._payload
        if payload is None:
            raise WeightsError(f"{self._key}: data came before its plan")
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

    async def _apply_all(self, payload: Payload) -> None:
        """Apply and check each tensor once its bytes are here, and check the others at last. Raise WrongBytes."""
        entries, starts, num_applied = payload.plan.entries, payload.plan.starts, 0
        while num_applied < len(entries):
            await payload.wait_for(starts[num_applied + 1])
            started, arrived = time.monotonic(), bisect_right(starts, payload.available) - 1
            end = await asyncio.to_thread(self._apply, payload, num_applied, arrived)
            self._pull.stats.apply_s += time.monotonic() - started
            if self._is_last:
                self._pull.announce(entry.tensor_index for entry in entries[num_applied:end])
            num_applied = end
        if self._is_last:
            await asyncio.to_thread(self._attempt.check_rest, self._key.shard)
            self._pull.announce(self._host.layout.shards[self._key.shard])

    def _apply(self, payload: Payload, first: int, end: int) -> int:
        """Apply and check the tensors from `first` on, up to `end` or APPLY_BYTES. Return where it stopped."""
        num_bytes = 0
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
            self._attempt.as_held.discard(entry.tensor_index)
            if self._is_last:
                self._attempt.check(entry.tensor_index, payload.key.shard)
            num_bytes += tensor.size_bytes
            if num_bytes >= APPLY_BYTES:
                return position + 1
        return end
