"""The owner of a host's copy of the weights: it moves the copy from version to version.

A version whose deltas fail is pulled in full; a version that no source delivers is tried again until the deadline.
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
    """The owner of the host's copy. One pull runs at a time: the caller starts the next when the copy has no readers.

    `find_trainer` returns the address of the trainer's rank 0; it is called again before every try, because a restarted
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
        """The address where this host serves others; empty if it serves none."""
        return self.connections.peer.address

    def serve_at(self, address: str) -> None:
        """Announce this address to the trainer from now on."""
        self.connections.peer = replace(self.connections.peer, address=address)

    def start(self, version: int, deadline_s: float, is_hopeless: Callable[[], bool] = lambda: False) -> Pull:
        """Start a pull, without a new try after `deadline_s` or once it is hopeless. No other pull may be running."""
        pull = Pull(version, deadline_s)
        pull.task = asyncio.create_task(self._run(pull, is_hopeless), name=f"pull version {version}")
        pull.task.add_done_callback(lambda _: pull.announce())
        pull.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a prefetch may have no waiter
        return pull

    async def describe(self) -> ModelDescription:
        """Return the model without weights, in one try. Raise WeightsError."""
        address = await self.find_trainer()
        try:
            return await self.connections.client(address).describe()
        except WeightsError:
            await self.connections.drop(address)
            raise

    async def payload(self, key: PayloadKey) -> Payload | None:
        """Implement `server.Holder.payload`."""
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
        host.layout = manifest  # the same tensors, maybe in other shards: the number of ranks may differ now
        await move.run(itinerary.steps)
        if len(pull.final) < len(manifest.tensors):
            raise WeightsError(f"the way to version {pull.version} that {address} named does not lead there")
        host.settle(manifest)
        pull.stats.ended_at = time.monotonic()
        pull.stats.pull_s = pull.stats.ended_at - started

    def _host_of(self, manifest: Manifest, address: str) -> HostWeights:
        """Return the copy, which fits the manifest's tensors. Raise WeightsError when they are another model's."""
        version = manifest.policy_version
        if self.host is not None and self.host.layout.layout != manifest.layout:
            if self.host.has_held:
                raise WeightsError(f"{address}: version {version} is of another model than the versions before it")
            self.host.close()  # it has no readers: it was made for a version that never came
            self.host = None
        if self.host is None:
            try:
                self.host = HostWeights(manifest, self._folder)
            except WeightsError as error:
                raise WeightsError(f"{address}: {error}") from error
        return self.host
