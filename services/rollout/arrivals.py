"""The names of tensors that arrive during one load, gathered for an engine: names that arrive while it works on others
are handed over as one batch. The load as a whole is checked before it may be served; no weight is touched here.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager

from services.rollout.weight_file import whole_modules


class Arrivals:
    """The arrivals of one load. `expected`: the names that may arrive. `must_be_all`: all of them must, because no
    version is served to build on.

    async with gathered(...) as arrived:
        while names := await arrived.take():   # the loop ends early when the iterator raises
            ...                                # load them
        ...                                    # close the load, whatever came of it
        arrived.check()                        # serve nothing if this raises
    """

    def __init__(self, arrivals: AsyncIterator[Sequence[str]], expected: Collection[str], *, must_be_all: bool) -> None:
        self._expected = set(expected)
        self._must_be_all = must_be_all
        self._named: set[str] = set()
        self._waiting: list[str] = []
        self._changed = asyncio.Event()
        self.gathering = asyncio.create_task(self._gather(arrivals), name="gather arriving tensors")
        self.gathering.add_done_callback(lambda _: self._changed.set())

    async def _gather(self, arrivals: AsyncIterator[Sequence[str]]) -> None:
        async for names in arrivals:
            batch = set(names)
            if unknown := batch - self._expected:
                raise ValueError(f"{len(unknown)} tensors arrived that the model does not have: {sorted(unknown)[:3]}")
            if twice := batch & self._named:
                raise ValueError(f"{len(twice)} tensors arrived twice: {sorted(twice)[:3]}")
            self._named |= batch
            self._waiting += names
            self._changed.set()

    async def take(self) -> list[str]:
        """Wait for names and return all since the last call; an empty list at the end or after an error."""
        while not self._waiting and not self.gathering.done():
            self._changed.clear()
            await self._changed.wait()
        names, self._waiting = self._waiting, []
        return names

    def check(self) -> None:
        """Check the load after its end. Raises the error of the iterator, or ValueError if tensors are missing."""
        self.gathering.result()
        needed = self._expected if self._must_be_all else whole_modules(self._named, self._expected)
        if missing := sorted(needed - self._named):
            reason = "no version is served to take them from" if self._must_be_all else "modules load as a whole"
            raise ValueError(f"{len(missing)} tensors did not arrive, but {reason}: {missing[:3]}")


@asynccontextmanager
async def gathered(
    arrivals: AsyncIterator[Sequence[str]], expected: Collection[str], *, must_be_all: bool
) -> AsyncIterator[Arrivals]:
    arrived = Arrivals(arrivals, expected, must_be_all=must_be_all)
    try:
        yield arrived
    finally:
        arrived.gathering.cancel()
        await asyncio.wait({arrived.gathering})
