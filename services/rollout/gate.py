"""The gate in front of the engine: a group generates only while the engine serves the version it is pinned to.

    group pinned to the served version   -> enters at once
    group pinned to another version      -> holds the entrance, waits until nothing is in flight, and loads its version
                                            while that is still being pulled
    any group behind it                  -> waits in line; one that wants the same version finds it loaded

The line is first in, first out, so a new version cannot be starved by groups of the old one, nor an older one by groups
of the new: a dead worker's group may ask for a version that all others have left.

Visitors (chats) get the version that is served when their turn in the line comes. They do not delay groups for long:
when a load could begin but for the groups and visitors inside, visitors have `grace_s` left. Then they are cancelled.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from onbeat.contracts.errors import WeightsError
from onbeat.engines import Engine, EngineBroken
from onbeat.weights.pull import Pull
from onbeat.weights.wire import Manifest
from services.rollout.engines.registry import give_up, wait_for_engine
from services.rollout.engines.weight_files import names_to_load
from services.rollout.puller import VersionGone, WeightsPuller

logger = logging.getLogger(__name__)

MAX_LOADS = 2  # attempts at loading a version
CLOSE_DEADLINE_S = 10.0
LEAVE_DEADLINE_S = 10.0  # a cancelled visitor has this long to leave

# This is called after each load, with the pull and the seconds that the load took.
LoadedCallback = Callable[[Pull, float], Awaitable[None]]


class PolicyMoved(Exception):
    """A visitor was cancelled because another version was due."""


@dataclass(frozen=True)
class GateLimits:
    load_s: float  # deadline of a load, once all of its weights are here
    grace_s: float = 0.0  # time that visitors have left once a load is due


class VersionGate:
    def __init__(
        self, engine: Engine, puller: WeightsPuller, on_loaded: LoadedCallback, held: Manifest, limits: GateLimits
    ) -> None:
        """Take an engine that was started with the weights of `held`."""
        self._engine, self._puller, self._on_loaded = engine, puller, on_loaded
        self._held, self._limits = held, limits
        self._entrance = asyncio.Lock()  # first in, first out
        self._num_groups = 0  # groups inside
        self._visits: set[asyncio.Timeout] = set()  # the timeouts of the visitors inside
        self._has_left = asyncio.Event()  # set when a group or visitor leaves
        self._wanted: int | None = None  # the version of the newest load
        self._load: asyncio.Task[None] | None = None
        self._failure: tuple[int, float, WeightsError] | None = None  # the last failed load: version, time, error

    @property
    def is_updating(self) -> bool:
        """True if a group waits for its version, or a load is under way."""
        return self._entrance.locked()

    @asynccontextmanager
    async def pinned(self, version: int) -> AsyncIterator[Engine]:
        """Yield the engine, which serves `version` inside this context. Raises WeightsError if the version cannot be
        pulled (VersionGone if the trainer has published a newer one), or EngineBroken."""
        arrived_at = time.monotonic()
        async with self._entrance:
            self._repeat_failure(version, arrived_at)
            await self._reach(version)
            self._num_groups += 1
        try:
            yield self._engine
        finally:
            self._num_groups -= 1
            self._has_left.set()

    async def advance(self, version: int) -> None:
        """Load a newer version before a group asks for it; nothing happens if it is not newer."""
        async with self._entrance:
            served = self._engine.version()
            if served is None or served < version:
                await self._reach(version)

    @asynccontextmanager
    async def visit(self) -> AsyncIterator[int]:
        """Yield the version that is served until this context ends. Raises PolicyMoved when the context was cancelled
        for a load, WeightsError when no version is served."""
        try:
            async with asyncio.timeout(None) as stay:
                async with self._entrance:
                    if self._load is not None:  # a load goes on when the group that began it has left
                        await asyncio.wait({self._load})
                    version = self._engine.version()
                    if version is None:
                        raise WeightsError("the engine serves no policy version: the last load failed")
                    self._visits.add(stay)
                try:
                    yield version
                finally:
                    self._visits.remove(stay)
                    self._has_left.set()
        except TimeoutError:
            if not stay.expired():
                raise
            raise PolicyMoved(f"the policy moved on from version {version} to {self._wanted}") from None

    async def _empty(self) -> None:
        """Wait until nothing is inside; cancel visitors after their grace. Raises EngineBroken if they do not leave."""
        loop = asyncio.get_running_loop()
        leave_at = loop.time() + self._limits.grace_s
        await self._until(lambda: not self._num_groups)
        self._let_leave(leave_at)
        try:
            async with asyncio.timeout_at(max(leave_at, loop.time()) + LEAVE_DEADLINE_S):
                await self._until(lambda: not self._visits)
        except asyncio.CancelledError:  # the waiting group was cancelled, so visitors may stay
            self._let_leave(None)
            raise
        except TimeoutError:
            message = f"{len(self._visits)} chats did not end {LEAVE_DEADLINE_S:.0f} s after they were cancelled"
            raise EngineBroken(message) from None

    def _let_leave(self, at: float | None) -> None:
        """Cancel the visits at this time of the loop's clock (None: never), except those that are cancelled already."""
        for visit in self._visits:
            if not visit.expired():
                visit.reschedule(at)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        """Wait until the condition holds. Only the holder of the entrance may call this."""
        while not is_so():
            self._has_left.clear()
            await self._has_left.wait()

    def _repeat_failure(self, version: int, arrived_at: float) -> None:
        """Raise the error of a failed pull for every group that was already waiting for it."""
        if self._failure is not None:
            failed_version, failed_at, error = self._failure
            if failed_version == version and failed_at > arrived_at:
                raise error

    async def _reach(self, version: int) -> None:
        if self._load is not None:  # a load is never abandoned, even if the group that began it was cancelled
            await asyncio.wait({self._load})
            if not self._load.cancelled() and isinstance(error := self._load.exception(), EngineBroken):
                raise error  # the group that began the load may have left before
        if self._engine.version() == version:
            return
        try:
            pull = await self._puller.obtain(version)
            await pull.known()
            self._wanted = version
            await self._empty()
            self._load = asyncio.create_task(self._replace(pull), name=f"load version {version}")
            await asyncio.shield(self._load)
        except WeightsError as error:
            gone = VersionGone(str(error)) if self._puller.is_gone(version, error) else error
            self._failure = (version, time.monotonic(), gone)
            raise gone from error

    async def _replace(self, pull: Pull) -> None:
        """Load the pulled version. Raises WeightsError when the version does not arrive (the engine then serves
        nothing), or EngineBroken."""
        host, manifest = self._puller.host, await pull.known()
        assert host is not None, "there is a copy where there is a manifest"
        for _ in range(MAX_LOADS):
            started = time.monotonic()
            error = await self._load_once(pull, host.path, manifest)
            if error is None:
                self._held = manifest
                await self._on_loaded(pull, time.monotonic() - started)
                return
            if pull.is_over and pull.error is not None:
                raise pull.error
            logger.error("policy version %d was not loaded: %s: %s", pull.version, type(error).__name__, error)
        raise EngineBroken(f"policy version {pull.version} could not be loaded: {error}") from error

    async def _load_once(self, pull: Pull, path: Path, manifest: Manifest) -> BaseException | None:
        """Try to load once. Return the error, or None: then all weights are here, as arrivals end with the pull.

        The pull has its own deadlines. Raises EngineBroken when the engine takes too long after the pull has ended.
        """
        names = names_to_load(None if self._engine.version() is None else self._held, manifest)
        load = asyncio.create_task(self._engine.load(pull.version, path, pull.arrivals(names)))
        over = asyncio.create_task(pull.over())
        with self._puller.reading():
            try:
                await asyncio.wait({load, over}, return_when=asyncio.FIRST_COMPLETED)
                work_name = f"the load of policy version {pull.version} into the engine"
                await wait_for_engine(load, self._limits.load_s, work_name, "ONBEAT_ENGINE_LOAD_S")
            finally:  # also when this task is cancelled
                over.cancel()
                await give_up(load)
            if (error := load.exception()) is None:
                self._puller.mark_read(pull)
            return error

    async def close(self) -> None:
        """Let a running load come to its end, so that the engine can be stopped."""
        if self._load is not None and not self._load.done():
            await self._puller.cancel()  # the load may be waiting for the pull
            await asyncio.wait({self._load}, timeout=CLOSE_DEADLINE_S)
            self._load.cancel()
