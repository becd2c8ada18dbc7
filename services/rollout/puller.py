"""Follows a job's weights: hears of new versions, pulls them at once to local disk, survives a trainer that moves.

The trainer's address is in the job; it is read again before every try, because a restarted trainer has another one.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from onbeat.errors import WeightsError
from onbeat.weights.client import ModelDescription, PullStats

logger = logging.getLogger(__name__)

MAX_FILES = 2  # the newest versions; besides them those that somebody waits for
FIRST_ANSWER_S = 10.0  # a server that accepts a watch answers at once with its current version
ADDRESS_CHECK_S = 2.0
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 3.0
PULL_DEADLINE_S = 20.0  # no new try after that


class VersionGone(WeightsError):
    """The server that is followed has told of a newer version, and cannot give this one: it may never again."""


class WeightsSource(Protocol):
    """The part of WeightsClient that a rollout needs."""

    async def describe(self) -> ModelDescription: ...

    async def pull(self, version: int, target: Path) -> PullStats: ...

    def watch(self) -> AsyncIterator[int]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True)
class PulledWeights:
    policy_version: int
    path: Path  # a complete, verified safetensors file
    num_bytes: int
    pull_s: float


class WeightsPuller:
    """`find_address` reads the job; what it raises (the job is gone, Redis is down) ends `follow`."""

    def __init__(
        self,
        connect: Callable[[str], WeightsSource],
        find_address: Callable[[], Awaitable[str]],
        staging_dir: Path,
    ) -> None:
        self._connect = connect
        self._find_address = find_address
        self._staging_dir = staging_dir
        self._pulls: dict[int, asyncio.Task[PulledWeights]] = {}  # running or finished
        self._newest = -1  # that was ever staged
        self._needed: Counter[int] = Counter()  # how many wait for a version: not to be dropped under their hands
        self._is_following: bool | None = None
        self._announced: int | None = None
        self._staged = asyncio.Event()

    async def describe(self) -> ModelDescription:
        """The model without weights. One try; raises WeightsError."""
        source = self._connect(await self._find_address())
        try:
            return await source.describe()
        finally:
            await source.close()

    @contextmanager
    def needing(self, version: int) -> Iterator[None]:
        """Inside, the file of this version is not dropped for newer ones."""
        self._needed[version] += 1
        try:
            yield
        finally:
            self._needed[version] -= 1

    async def fetch(self, version: int, deadline_s: float = PULL_DEADLINE_S) -> PulledWeights:
        """The version on local disk, pulled before or now. Raises VersionGone, or WeightsError after tries for
        `deadline_s`."""
        deadline = time.monotonic() + deadline_s
        delay_s = FIRST_RETRY_S
        while True:
            try:
                with self.needing(version):
                    return await asyncio.shield(self._start_pull(version))
            except WeightsError as error:
                if self.is_announced(version + 1):
                    raise VersionGone(str(error)) from error
                if time.monotonic() + delay_s > deadline:
                    raise
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, MAX_RETRY_S)

    def newest_staged(self) -> int | None:
        return max((version for version, pull in self._pulls.items() if is_staged(pull)), default=None)

    def is_announced(self, version: int) -> bool:
        """Whether the weights server that is followed now has told of this version or a later one.

        A restarted trainer begins again at its checkpoint and announces lower versions than the one before.
        """
        return self._announced is not None and self._announced >= version

    async def wait_for_staged(self) -> None:
        """Return when another version has been staged since the last call."""
        await self._staged.wait()
        self._staged.clear()

    def discard(self, version: int) -> None:
        """Drop the file of a version that is loaded or useless."""
        pull = self._pulls.get(version)
        if pull is not None and pull.done():
            del self._pulls[version]
            self._path(version).unlink(missing_ok=True)

    async def follow(self) -> None:
        """Watch for versions and stage each newer one, for ever; every change of the link is one line in the log."""
        delay_s = FIRST_RETRY_S
        while True:
            address = await self._find_address()
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

    async def close(self) -> None:
        pulls = list(self._pulls.values())
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)

    async def _watch(self, address: str) -> None:
        """Until the server is silent at first or gone (WeightsError), or the job names another address."""
        source = self._connect(address)
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
                elif await self._find_address() != address:
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
        if version > self._newest:
            self._start_pull(version)

    def _start_pull(self, version: int) -> asyncio.Task[PulledWeights]:
        """The one pull of this version, running or done."""
        if version not in self._pulls:
            self._pulls[version] = asyncio.create_task(self._pull(version), name=f"pull version {version}")
            self._pulls[version].add_done_callback(lambda pull: self._finish_pull(version, pull))
        return self._pulls[version]

    async def _pull(self, version: int) -> PulledWeights:
        source = self._connect(await self._find_address())
        try:
            path = self._path(version)
            stats = await source.pull(version, path)
            return PulledWeights(version, path, stats.num_bytes, stats.pull_s)
        finally:
            await source.close()

    def _finish_pull(self, version: int, pull: asyncio.Task[PulledWeights]) -> None:
        if is_staged(pull):
            self._newest = max(self._newest, version)
            self._staged.set()
            for old in sorted(self._pulls)[:-MAX_FILES]:
                if not self._needed[old]:
                    self.discard(old)
            return
        del self._pulls[version]  # the next announcement tries again
        if not pull.cancelled():
            logger.warning("policy version %d was not pulled: %s", version, pull.exception())

    def _path(self, version: int) -> Path:
        return self._staging_dir / f"policy-{version}.safetensors"


def is_staged(pull: asyncio.Task[PulledWeights]) -> bool:
    return pull.done() and not pull.cancelled() and pull.exception() is None
