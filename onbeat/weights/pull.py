"""A pull of a version to a host, as those see it who wait for it.

    mover.py   manifest -> move -> settled; tries again until the deadline; one pull at a time
    move.py    one try: step by step; locate -> receive and apply -> verify, tensor by tensor

A tensor is final when its digest is the manifest's, or, where every byte came from the trainer that also sent the
manifest, its checksum: engines may read it from then on. A version is held when all are.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from onbeat.errors import WeightsError
from onbeat.weights.framing import Manifest


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
