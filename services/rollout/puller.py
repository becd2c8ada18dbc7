"""The follower of a job's weights: it hears of versions, and decides which is pulled, when, and from which trainer.

    an announced version   is pulled at once, in one try, unless the copy is still wanted as it is
    a version in demand    is tried again until its deadline (`obtain`)
    the trainer            is read from the job before every try: a restarted one has another address

There is one copy of the weights here, so there is one pull at a time, and the copy stays at a version until the engine
has read it. A version whose deltas fail is pulled in full by the next try. A copy that is not needed once the engine
has read it, neither by peers nor for the next delta, gives its memory back until the next pull (`is_kept`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from onbeat.contracts.errors import VersionNotHeld, WeightsError
from onbeat.weights.client import Connections, ModelDescription, WeightsClient
from onbeat.weights.host import HostWeights
from onbeat.weights.pull import Attempt, Pull
from onbeat.weights.server import Payload
from onbeat.weights.wire import Manifest, PayloadKey, Peer

logger = logging.getLogger(__name__)

FIRST_ANSWER_S = 10.0  # a server that accepts a watch answers at once with its current version
ADDRESS_CHECK_S = 2.0
FIRST_RETRY_S, MAX_RETRY_S = 0.1, 3.0
PULL_DEADLINE_S = 20.0  # no new try begins after that


class VersionGone(WeightsError):
    """The followed server has announced a newer version and cannot give this one, perhaps never again."""


class OtherWeights(WeightsError):
    """The trainer has restarted and made the version anew; earlier statements about the version are void."""


class Announcements:
    """The versions that the trainer's weights server announces, heard over one connection that is made again and again.

    `react` is called after each announcement. `find_trainer` and `connect` are those of the puller.
    """

    def __init__(
        self,
        connect: Callable[[str], WeightsClient],
        find_trainer: Callable[[], Awaitable[str]],
        react: Callable[[], None],
    ) -> None:
        self.newest: int | None = None  # None: the server is silent
        self._connect, self._find_trainer, self._react = connect, find_trainer, react
        self._is_following: bool | None = None
        self._news = asyncio.Event()

    def has_reached(self, version: int) -> bool:
        """Return whether the weights server that is followed now has announced this version or a later one.

        A restarted trainer begins again at its checkpoint and announces lower versions than the one before.
        """
        return self.newest is not None and self.newest >= version

    async def wait(self) -> int | None:
        """Wait for an announcement since the last call. Returns the newest version, or None if its server is lost."""
        await self._news.wait()
        self._news.clear()
        return self.newest

    async def follow(self) -> None:
        """Listen for ever; a change of the connection is logged in one line."""
        delay_s = FIRST_RETRY_S
        while True:
            address = "an unknown address"
            try:
                address = await self._find_trainer()
                await self._watch(address)
                reason = "it has moved"
            except WeightsError as error:
                reason = str(error)
            if self._is_following is not False:
                logger.warning("no word from the weights server at %s, trying again: %s", address, reason)
                delay_s = FIRST_RETRY_S
            self._is_following = False
            self.newest = None
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, MAX_RETRY_S)

    async def _watch(self, address: str) -> None:
        """Watch until the job names another address. Raises WeightsError when the server is silent at first or gone."""
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
                elif await self._find_trainer() != address:
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
        self.newest = version
        self._news.set()
        self._react()


class WeightsPuller:
    """The owner of the host's copy of the weights, and of its connections. Peers pull from it, too (`PayloadOwner`).

    `find_trainer` returns the address of the trainer's rank 0; any error other than WeightsError, such as a lost Redis,
    ends `announcements.follow`. `connect` makes a client of an address. `find_digest` returns the digest of a version
    in the ledger, or "" if it has none yet; without a ledger, what answers at the address is believed.
    """

    def __init__(
        self,
        connect: Callable[[str], WeightsClient],
        find_trainer: Callable[[], Awaitable[str]],
        peer: Peer,
        *,
        find_digest: Callable[[int], Awaitable[str]] | None = None,
        is_kept: bool = True,
    ) -> None:
        self.host: HostWeights | None = None
        self.connections = Connections(connect, peer)
        self._find_trainer, self._find_digest, self._is_kept = find_trainer, find_digest, is_kept
        self._current: Pull | None = None  # the version that the copy holds, or moves to
        self._read: Pull | None = None  # the pull whose result the engine has read
        self._is_being_read = False
        self.announcements = Announcements(connect, find_trainer, self._prefetch)

    # ---- for the engine's side ---------------------------------------------------------------------------------------

    async def describe(self) -> ModelDescription:
        """Return the model without weights, in one try. Raise WeightsError."""
        address = await self._find_trainer()
        try:
            return await self.connections.client(address).describe()
        except WeightsError:
            await self.connections.drop(address)
            raise

    async def obtain(self, version: int, deadline_s: float = PULL_DEADLINE_S) -> Pull:
        """Return the pull of this version, running or done; if there is none, start it after the running one."""
        while True:
            current = self._current
            if current is not None and current.version == version and current.error is None:
                current.deadline = max(current.deadline, time.monotonic() + deadline_s)
                return current
            if current is None or current.is_over:
                return self.start(version, deadline_s)
            await current.over()

    def is_gone(self, version: int, error: WeightsError) -> bool:
        """Return whether the trainer that has refused the version is beyond it."""
        return isinstance(error, VersionNotHeld) and self.announcements.has_reached(version + 1)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the copy as it is while it is read inside this context."""
        self._is_being_read = True
        try:
            yield
        finally:
            self._is_being_read = False
            self._prefetch()

    def mark_read(self, pull: Pull) -> None:
        """Note that the pulled version has been read: the copy may move on, or go."""
        self._read = pull
        if not self._is_kept and self.host is not None:
            self.host.release()
            self._current = None  # the next request for the version pulls it again
        self._prefetch()

    async def cancel(self) -> None:
        """Cancel the running pull; those that wait for it get WeightsError."""
        if self._current is not None:
            await self._current.cancel()

    async def close(self) -> None:
        await self.cancel()
        await self.connections.close()
        if self.host is not None:
            self.host.close()

    # ---- for peers ---------------------------------------------------------------------------------------------------

    def serve_at(self, address: str) -> None:
        """Announce this address to the trainer from now on."""
        self.connections.peer.address = address

    async def payload(self, key: PayloadKey) -> Payload | None:
        return None if self.host is None else await self.host.payload(key)

    def versions(self) -> list[int]:
        return [] if self.host is None else self.host.versions()

    # ---- pulling -----------------------------------------------------------------------------------------------------

    def _prefetch(self) -> None:
        """Pull the announced version before it is asked for, unless the copy is still wanted as it is."""
        current, announced = self._current, self.announcements.newest
        is_newer = announced is not None and (self._read is None or announced > self._read.version)
        is_unread = current is not None and (not current.is_over or (not current.error and current is not self._read))
        if announced is not None and is_newer and not is_unread and not self._is_being_read:
            self.start(announced, deadline_s=0.0)  # one try, unless `obtain` extends it

    def start(self, version: int, deadline_s: float) -> Pull:
        """Start a pull, without a new try after `deadline_s`. No other pull may be running."""
        pull = self._current = Pull(version, deadline_s)
        pull.task = asyncio.create_task(self._run(pull), name=f"pull version {version}")
        pull.task.add_done_callback(lambda _: pull.announce())
        pull.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a prefetch may have no waiter
        return pull

    async def _run(self, pull: Pull) -> None:
        """Try until the version is here. Raise the last try's error after the deadline, or when it is hopeless."""
        delay_s = FIRST_RETRY_S
        while True:
            address = ""
            try:
                address = await self._find_trainer()
                await self._try(pull, address)
                return
            except WeightsError as error:
                await self.connections.drop(address)
                is_late = time.monotonic() + delay_s > pull.deadline
                if is_late or isinstance(error, OtherWeights) or self.is_gone(pull.version, error):
                    raise
                pull.stats.faults.append(str(error))
                logger.warning("policy version %d is tried again: %s", pull.version, error)
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, MAX_RETRY_S)

    async def _try(self, pull: Pull, address: str) -> None:
        started = time.monotonic()
        trainer = self.connections.client(address)
        itinerary = await trainer.itinerary(pull.version, None if self.host is None else self.host.version)
        if pull.manifest is not None and pull.manifest.digest != itinerary.manifest.digest:
            raise OtherWeights(f"{address}: version {pull.version} has other weights than when its pull began")
        await self._compare_with_ledger(itinerary.manifest, address)
        host = self._host_of(itinerary.manifest, address)
        is_in_ledger = self._find_digest is not None
        await Attempt(pull, host, trainer, self.connections, is_in_ledger=is_in_ledger).run(itinerary)
        pull.stats.ended_at = time.monotonic()
        pull.stats.pull_s = pull.stats.ended_at - started

    async def _compare_with_ledger(self, manifest: Manifest, address: str) -> None:
        """Raise WeightsError unless the manifest is of the weights that the trainer has announced in the ledger."""
        if self._find_digest is None:
            return
        version, announced = manifest.policy_version, await self._find_digest(manifest.policy_version)
        if not announced:
            raise WeightsError(f"the trainer has not announced policy version {version} in the ledger yet")
        if manifest.digest.hex() != announced:
            raise WeightsError(
                f"{address} answers with other weights than the trainer has announced: version {version} has digest "
                f"{manifest.digest.hex()[:12]}, in the ledger {announced[:12]}. If the trainer does not listen there, "
                "something else does"
            )

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
                self.host = HostWeights(manifest)
            except WeightsError as error:
                raise WeightsError(f"{address}: {error}") from error
        return self.host
