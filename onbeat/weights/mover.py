"""Owns a host's copy of the weights and moves it from version to version.

What fails on the way of deltas is pulled in full; what no source gives is tried again until the deadline.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from onbeat.errors import WeightsError
from onbeat.weights.client import ModelDescription, Peer
from onbeat.weights.connections import Connections, WeightsSource
from onbeat.weights.framing import Manifest
from onbeat.weights.host import HostWeights
from onbeat.weights.move import Move
from onbeat.weights.payload import Payload, PayloadKey
from onbeat.weights.pull import OtherWeights, Pull

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
        self.connections = Connections(connect, peer)
        self.find_trainer, self._folder = find_trainer, folder

    @property
    def address(self) -> str:
        """Where this host serves others; empty: it serves nobody."""
        return self.connections.peer.address

    def serve_at(self, address: str) -> None:
        """Name this address to the trainer from now on."""
        self.connections.peer = replace(self.connections.peer, address=address)

    def start(self, version: int, deadline_s: float, is_hopeless: Callable[[], bool] = lambda: False) -> Pull:
        """No new try after `deadline_s`, or when it is hopeless. The running pull, if any, has to be over."""
        pull = Pull(version, deadline_s)
        pull.task = asyncio.create_task(self._run(pull, is_hopeless), name=f"pull version {version}")
        pull.task.add_done_callback(lambda _: pull.announce())
        pull.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may wait for a prefetch
        return pull

    async def describe(self) -> ModelDescription:
        """The model without weights. One try; raises WeightsError."""
        address = await self.find_trainer()
        try:
            return await self.connections.client(address).describe()
        except WeightsError:
            await self.connections.drop(address)
            raise

    async def payload(self, key: PayloadKey) -> Payload | None:
        """See `server.Holder`."""
        return None if self.host is None else await self.host.payload(key)

    def versions(self) -> list[int]:
        return [] if self.host is None else self.host.versions()

    async def close(self) -> None:
        await self.connections.close()
        if self.host is not None:
            self.host.close()

    # ---- one pull ----------------------------------------------------------------------------------------------------

    async def _run(self, pull: Pull, is_hopeless: Callable[[], bool]) -> None:
        delay_s = FIRST_RETRY_S
        while True:
            address = ""
            try:
                address = await self.find_trainer()
                await self._try(pull, address)
                return
            except WeightsError as error:
                await self.connections.drop(address)
                is_late = time.monotonic() + delay_s > pull.deadline
                if is_late or isinstance(error, OtherWeights) or is_hopeless():
                    raise
                pull.stats.faults.append(str(error))
                logger.warning("policy version %d is tried again: %s", pull.version, error)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, MAX_RETRY_S)

    async def _try(self, pull: Pull, address: str) -> None:
        started = time.monotonic()
        trainer = self.connections.client(address)
        itinerary = await trainer.itinerary(pull.version, None if self.host is None else self.host.version)
        manifest = itinerary.manifest
        if pull.manifest is not None and pull.manifest.digest != manifest.digest:
            raise OtherWeights(f"{address}: version {pull.version} has other weights than when its pull began")
        host = self._host_of(manifest, address)
        pull.stats.full_bytes = manifest.size_bytes
        pull.stepped_at = time.monotonic() - itinerary.age_s
        pull.manifest = manifest
        pull.announce()
        move = Move(pull, host, trainer, self.connections)
        host.begin(f"version {pull.version} replaces it")
        host.layout = manifest  # the same tensors, maybe in other shards: the trainer may have other ranks now
        await move.run(itinerary.steps)
        if len(pull.final) < len(manifest.tensors):
            raise WeightsError(f"the way to version {pull.version} that {address} named does not lead there")
        host.settle(manifest)
        pull.stats.ended_at = time.monotonic()
        pull.stats.pull_s = pull.stats.ended_at - started

    def _host_of(self, manifest: Manifest, address: str) -> HostWeights:
        """Return the copy, with room for the manifest's tensors. Raises WeightsError when it is another model's."""
        version = manifest.policy_version
        if self.host is not None and self.host.layout.layout != manifest.layout:
            if self.host.has_held:
                raise WeightsError(f"{address}: version {version} is of another model than the versions before it")
            self.host.close()  # nobody reads it: it was made for a version that never came
            self.host = None
        if self.host is None:
            try:
                self.host = HostWeights(manifest, self._folder)
            except WeightsError as error:
                raise WeightsError(f"{address}: {error}") from error
        return self.host
