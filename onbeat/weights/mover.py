"""Owns a host's copy of the weights and moves it from version to version.

What fails on the way of deltas is pulled in full; what no source gives is tried again until the deadline.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from onbeat.errors import WeightsError
from onbeat.weights.client import Itinerary, ModelDescription, Peer
from onbeat.weights.framing import Manifest
from onbeat.weights.host import HostWeights
from onbeat.weights.payload import Payload, PayloadKey
from onbeat.weights.pull import OtherWeights, Pull, WeightsSource
from onbeat.weights.shard_pull import ShardPull

logger = logging.getLogger(__name__)

FIRST_RETRY_S, MAX_RETRY_S = 0.1, 3.0


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
