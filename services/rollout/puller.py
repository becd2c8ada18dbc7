"""The follower of a job's weights: it pulls new versions as soon as they are announced, and survives a trainer that
moves.

There is one copy of the weights here, so there is one pull at a time, and the copy stays at a version until the engine
has read it. The trainer's address is in the job; it is read again before every try: a restarted trainer has another.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from onbeat.errors import WeightsError
from onbeat.weights.mover import WeightsMover
from onbeat.weights.pull import Pull

logger = logging.getLogger(__name__)

FIRST_ANSWER_S = 10.0  # a server that accepts a watch answers at once with its current version
ADDRESS_CHECK_S = 2.0
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 3.0
PULL_DEADLINE_S = 20.0  # no new try begins after that


class VersionGone(WeightsError):
    """The followed server has announced a newer version and cannot give this one, perhaps never again."""


class WeightsPuller:
    """The mover's `find_trainer` reads the job; what it raises (the job is gone, Redis is down) ends `follow`."""

    def __init__(self, mover: WeightsMover) -> None:
        self.mover = mover
        self._current: Pull | None = None  # the version that the copy holds, or moves to
        self._read: Pull | None = None  # the pull whose result the engine has read
        self._is_being_read = False
        self._is_following: bool | None = None
        self._announced: int | None = None
        self._news = asyncio.Event()

    async def obtain(self, version: int, deadline_s: float = PULL_DEADLINE_S) -> Pull:
        """Return the pull of this version, running or done; if there is none, start it after the running one."""
        while True:
            current = self._current
            if current is not None and current.version == version and current.error is None:
                current.deadline = max(current.deadline, time.monotonic() + deadline_s)
                return current
            if current is None or current.is_over:
                return self._start(version, deadline_s)
            await current.over()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the copy as it is while it is read inside this context."""
        self._is_being_read = True
        try:
            yield
        finally:
            self._is_being_read = False
            self._prefetch()

    def is_announced(self, version: int) -> bool:
        """Return whether the weights server that is followed now has announced this version or a later one.

        A restarted trainer begins again at its checkpoint and announces lower versions than the one before.
        """
        return self._announced is not None and self._announced >= version

    async def wait_for_news(self) -> int | None:
        """Wait for an announcement since the last call. Returns the newest version, or None if its server is lost."""
        await self._news.wait()
        self._news.clear()
        return self._announced

    async def follow(self) -> None:
        """Watch for versions and pull each newer one, for ever; a change of the connection is logged in one line."""
        delay_s = FIRST_RETRY_S
        while True:
            address = await self.mover.find_trainer()
            try:
                await self._watch(address)
                reason = "it has moved"
            except WeightsError as error:
                reason = str(error)
            if self._is_following is not False:
                logger.warning("no word from the weights server at %s, trying again: %s", address, reason)
                delay_s = FIRST_RETRY_S
            self._is_following = False
            self._announced = None
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, MAX_RETRY_S)

    def mark_read(self, pull: Pull) -> None:
        """Note that the pulled version has been read: the copy may move on."""
        self._read = pull
        self._prefetch()

    async def cancel(self) -> None:
        """Cancel the running pull; those that wait for it get WeightsError."""
        if self._current is not None:
            await self._current.cancel()

    async def close(self) -> None:
        await self.cancel()
        await self.mover.close()

    async def _watch(self, address: str) -> None:
        """Watch until the job names another address. Raises WeightsError when the server is silent at first or gone."""
        source = self.mover.connections.connect(address)
        versions = source.watch()
        upcoming: asyncio.Future[int | None] | None = None
        try:
            started = time.monotonic()
            has_answered = False
            while True:
                upcoming = upcoming or asyncio.ensure_future(anext(versions, None))
                done, _ = await asyncio.wait({upcoming}, timeout=ADDRESS_CHECK_S)
                if done:
                    self._hear(upcoming.result(), address)
                    upcoming, has_answered = None, True
                elif not has_answered and time.monotonic() - started > FIRST_ANSWER_S:
                    raise WeightsError(f"no answer for {FIRST_ANSWER_S:.0f} s")
                elif await self.mover.find_trainer() != address:
                    return
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.wait({upcoming})
            await source.close()

    def _hear(self, version: int | None, address: str) -> None:
        if version is None:
            raise WeightsError("the server closed the watch")
        if not self._is_following:
            logger.info("following the weights at %s, now at policy version %d", address, version)
        self._is_following = True
        self._announced = version
        self._news.set()
        self._prefetch()

    def _prefetch(self) -> None:
        """Pull the announced version before it is asked for, unless the copy is still wanted as it is."""
        current, announced = self._current, self._announced
        is_newer = announced is not None and (self._read is None or announced > self._read.version)
        is_unread = current is not None and (not current.is_over or (not current.error and current is not self._read))
        if announced is not None and is_newer and not is_unread and not self._is_being_read:
            self._start(announced, deadline_s=0.0)  # one try, unless `obtain` extends it

    def _start(self, version: int, deadline_s: float) -> Pull:
        self._current = self.mover.start(version, deadline_s, lambda: self.is_announced(version + 1))
        return self._current
