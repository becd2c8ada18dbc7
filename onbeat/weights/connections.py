"""The connections of a host to its sources of weights, and the protocol that every source implements."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, Protocol

from onbeat.weights.client import Itinerary, ModelDescription, Peer
from onbeat.weights.payload import PayloadKey, Plan


class WeightsSource(Protocol):
    """The part of `WeightsClient` that a pull needs."""

    async def describe(self) -> ModelDescription: ...
    async def itinerary(self, version: int, base_version: int | None = None) -> Itinerary: ...
    async def locate(self, key: PayloadKey, puller: Peer, failed: Sequence[str]) -> str: ...
    async def finish(self, key: PayloadKey, worker_id: str, is_complete: bool) -> None: ...
    def pull(self, key: PayloadKey, offset_bytes: int = 0) -> AsyncGenerator[Plan | memoryview, None]: ...
    def watch(self) -> AsyncIterator[int]: ...
    async def close(self) -> None: ...


class Connections:
    """The clients of a host, one for each address. `peer` is how the host presents itself to others."""

    def __init__(self, connect: Callable[[str], WeightsSource], peer: Peer) -> None:
        self.connect, self.peer = connect, peer
        self._clients: dict[str, WeightsSource] = {}
        self._background: set[asyncio.Task[None]] = set()

    def client(self, address: str) -> WeightsSource:
        if address not in self._clients:
            self._clients[address] = self.connect(address)
        return self._clients[address]

    async def drop(self, address: str) -> None:
        """Close the connection; the next call opens a new one."""
        if (client := self._clients.pop(address, None)) is not None:
            await client.close()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a call that no caller waits for; `close` cancels it if it is still running."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        for task in self._background:
            task.cancel()
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
