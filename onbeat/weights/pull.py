"""A pull of a version to a host, as seen by those that wait for it.

    mover.py   manifest -> move -> settled; tries again until the deadline; one pull at a time
    move.py    one try: step by step; locate -> receive and apply -> verify, tensor by tensor

A tensor is final when its digest is the manifest's, or, where every byte came from the trainer that also sent the
manifest, its checksum: engines may read it from then on. A version is held when all its tensors are final.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from onbeat.errors import WeightsError
from onbeat.weights.framing import Manifest


class WrongBytes(WeightsError):
    """The received bytes do not match the manifest."""


class OtherWeights(WeightsError):
    """The trainer has restarted and made the version anew; earlier statements about the version are void."""


@dataclass
class PullStats:
    full_bytes: int = 0  # of the version
    received_bytes: int = 0
    pull_s: float = 0.0  # from the manifest to the last verified tensor
    ended_at: float = 0.0  # time.monotonic() here of the last verified tensor
    apply_s: float = 0.0  # decoding and verifying, summed over shards
    sources: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)  # problems that were overcome


class Pull:
    """One move to a version, as others see it. `WeightsMover.start` makes it."""

    def __init__(self, version: int, deadline_s: float) -> None:
        self.version = version
        self.deadline = time.monotonic() + deadline_s  # there is no new try after it; may be put off
        self.manifest: Manifest | None = None  # once it is known
        self.stats = PullStats()
        self.final: set[int] = set()  # tensors whose bytes are the manifest's
        self.stepped_at = 0.0  # time.monotonic() here when the version's optimizer step began
        self._news = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

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
        """Wait for news. Deadlines are up to the mover."""
        if (error := self.error) is not None:
            raise error
        await self._news.wait()
