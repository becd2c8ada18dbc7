"""The training loop's link to its job: lease, groups in, weights out. Synchronous face of the ledger."""

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.errors import LeaseLost, OnbeatError
from onbeat.streams.codec import RolloutGroup
from onbeat.streams.ledger import Ledger
from onbeat.types import IterationState, JobState, PublishedWeights
from onbeat.weights.client import Peer
from onbeat.weights.host import host_id
from onbeat.weights.security import reachable_host
from services.trainer.job.background import Background
from services.trainer.job.meters import CommitMeter
from services.trainer.job.watchdog import Watchdog
from services.trainer.settings import Settings
from services.trainer.spans import Span, to_record
from services.trainer.stats import Advantages
from services.trainer.weights.relay_tree import Sources
from services.trainer.weights.server import WeightServer
from services.trainer.weights.store import Snapshot, WeightStore, num_served
from services.trainer.world import World

logger = logging.getLogger(__name__)

T = TypeVar("T")


class JobCancelled(Exception):
    """The user cancelled; stop at the next safe point."""


class Stopped(Exception):
    """This process was asked to stop; the job goes on elsewhere."""


@dataclass(frozen=True)
class Commit:
    """The trainer's report at the end of an iteration."""

    iteration: int
    snapshot: Snapshot  # the version that the iteration made
    metrics: dict[str, float]
    used: str  # the `used_digest` of the groups that the step was made of
    is_published: bool  # False: rollouts stay on the version that they have (`bounded` only)
    spans: Sequence[Span]
    advantages: Advantages


class Link(Protocol):
    """The training loop's view of its job: live (`JobLink`) or recorded (`replay.RecordedLink`)."""

    job_id: str
    config: JobConfig
    doing: str  # set by the steps of the training, for people: the next heartbeat reports it

    def check(self) -> JobState: ...
    def accepted_groups(self, first_iteration: int) -> list[RolloutGroup]: ...
    def take_groups(self, count: int, timeout_s: float) -> list[RolloutGroup]: ...
    def iteration_version(self, iteration: int) -> int: ...
    def is_drained(self, iteration: int) -> bool: ...
    def recorded_micro_batches(self, iteration: int) -> list[list[str]]: ...
    def taken_groups(self, iteration: int) -> set[str]: ...
    def record_micro_batch(self, iteration: int, group_ids: list[str]) -> list[str]: ...
    def hold(self, snapshot: Snapshot, delta_bytes: int | None) -> None: ...
    def publish(self, snapshot: Snapshot, published: PublishedWeights) -> None: ...
    def commit(self, commit: Commit) -> bool: ...
    def checkpointed(self, first: int, next_iteration: int, path: str) -> None: ...
    def wait_for_evaluation(self) -> None: ...
    def emit(self, kind: str, message: str) -> None: ...


class JobLink:
    """A job session, valid while the lease is held. Every method raises LeaseLost once another trainer owns the job."""

    def __init__(
        self,
        background: Background,
        ledger: Ledger,
        job_id: str,
        epoch: str,
        config: JobConfig,
        lease_s: float,
        stop: threading.Event,
        rank: int = 0,
        num_replicas: int = 1,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.job_id, self.config, self.epoch = job_id, config, epoch
        self._doing, self._watchdog = "loading the model", watchdog
        self._background, self._ledger, self._epoch = background, ledger, epoch
        self._lease_s, self._stop = lease_s, stop
        self._state = JobState.RUNNING
        self._lost: Exception | None = None
        self._rank, self._num_replicas = rank, num_replicas
        self._consumer = f"rank-{rank}"  # stable, so that a successor finds what its predecessor had taken
        self._num_recorded: dict[int, int] = {}  # iteration -> micro-batches under this rank
        self._store = WeightStore(num_served(config))
        self._server: WeightServer | None = None
        self._address = ""
        self._meter = CommitMeter()
        self._heartbeat = background.start(self._keep_lease())

    @property
    def doing(self) -> str:
        return self._doing

    @doing.setter
    def doing(self, doing: str) -> None:
        self._doing = doing
        self.progress()

    def progress(self) -> None:
        """Report to the watchdog that the main thread makes progress; `check` and each call of the ledger do so."""
        if self._watchdog is not None:
            self._watchdog.progress()

    async def _keep_lease(self) -> None:
        """Renew in time, and notice a cancel within a second. A failure ends it: `check` raises it while training."""
        try:
            while True:
                self._state = await self._renew()
                await self._warn_of_stall()
                await asyncio.sleep(min(0.25, self._lease_s / 3))
        except (OnbeatError, RedisError) as error:
            self._lost = error

    async def _renew(self) -> JobState:
        """Rank 0 keeps the lease; the other ranks only look whether it is still theirs."""
        if self._rank == 0:
            return await self._ledger.trainer.renew_job(self.job_id, self._epoch, self._lease_s, self.doing)
        fields = await self._ledger.jobs.fields(self.job_id)
        if fields["epoch"] != self._epoch:
            raise LeaseLost(f"job {self.job_id} has another trainer now")
        return JobState(fields["state"])

    async def _warn_of_stall(self) -> None:
        if self._watchdog is not None and (warning := self._watchdog.warning(self._doing)):
            logger.error("job %s: %s", self.job_id, warning)
            await self._ledger.event_log.emit(self.job_id, "trainer.stalled", warning)

    def check(self) -> JobState:
        """Return the job's state. Raises LeaseLost, JobCancelled, Stopped, or what broke the heartbeat."""
        self.progress()
        if self._lost is not None:
            raise self._lost
        if self._stop.is_set():
            raise Stopped
        if self._state is JobState.CANCELLING:
            raise JobCancelled
        if self._state.is_final:
            raise LeaseLost(f"job {self.job_id} is {self._state}")
        return self._state

    # ---- weights -------------------------------------------------------------------------------------------------

    def serve_weights(self, files: dict[str, bytes], settings: Settings, shards: World) -> None:
        """Serve weights on rank 0 and on every rank of `shards`: each what it holds, and rank 0 knows who holds what.

        Raises WeightsError when the port is taken, ValueError when certificates are not usable.
        """
        if self._rank > 0 and shards.size == 1:
            return
        security = settings.wire_security()
        server = WeightServer(self.job_id, files, self._store, security, settings.weights_max_calls)
        port = settings.weights_port + self._rank if settings.weights_port else 0
        bound = self._background.run(server.start(settings.weights_host, port))
        self._server = server
        self._address = f"{reachable_host(settings.weights_host, settings.weights_advertise)}:{bound}"
        own = Peer(settings.trainer_id, self._address, host_id(), settings.zone)
        roots = [Peer(**json.loads(message)) for message in shards.all_gather_bytes(json.dumps(vars(own)).encode())]
        server.sources = Sources(roots, settings.weights_egress, settings.weights_fanout)

    def hold(self, snapshot: Snapshot, delta_bytes: int | None) -> None:
        """Let rollouts pull this version, without announcing it. `delta_bytes`: of all shards; None: in full only."""
        self._store.add(snapshot, delta_bytes)

    def publish(self, snapshot: Snapshot, published: PublishedWeights) -> None:
        """Announce this version, which is held: rollouts pull it from now on."""
        self.doing = f"publishing policy version {snapshot.policy_version}"
        assert self._server is not None
        version, digest = snapshot.policy_version, snapshot.manifest.digest.hex()
        self._background.run(self._server.announce())
        self._run(self._ledger.versions.announce(self.job_id, self._epoch, version, self._address, digest, published))

    # ---- groups --------------------------------------------------------------------------------------------------

    def take_groups(self, count: int, timeout_s: float) -> list[RolloutGroup]:
        """Return up to `count` accepted groups in completion order, or an empty list when none came in time."""
        return self._run(self._ledger.trainer.take(self.job_id, self._consumer, count, timeout_s))

    def accepted_groups(self, first_iteration: int) -> list[RolloutGroup]:
        """Return all accepted groups from an iteration on, in completion order, including those taken before."""

        async def collect() -> list[RolloutGroup]:
            num_opened = int((await self._ledger.jobs.fields(self.job_id))["num_opened"])
            groups = []
            for iteration in range(first_iteration, num_opened):
                groups += await self._ledger.iterations.accepted_groups(self.job_id, iteration)
            return groups

        return self._run(collect())

    def iteration_version(self, iteration: int) -> int:
        """Return the one policy version of an open iteration."""
        version = self._run(self._ledger.iterations.policy_version(self.job_id, iteration))
        assert version is not None, f"iteration {iteration} is not open"
        return version

    def is_drained(self, iteration: int) -> bool:
        """Return whether every group of the iteration is accepted."""
        return self._run(self._ledger.iterations.state(self.job_id, iteration)) is not IterationState.OPEN

    def recorded_micro_batches(self, iteration: int) -> list[list[str]]:
        """Return the micro-batches of this replica and of replicas that have gone, in the order of recording."""
        recorded = self._run(self._ledger.iterations.micro_batches(self.job_id, iteration))
        self._num_recorded = {iteration: sum(rank == self._rank for rank, _ in recorded)}
        return [group_ids for rank, group_ids in recorded if rank % self._num_replicas == self._rank]

    def taken_groups(self, iteration: int) -> set[str]:
        return self._run(self._ledger.iterations.taken_groups(self.job_id, iteration))

    def record_micro_batch(self, iteration: int, group_ids: list[str]) -> list[str]:
        """Write down, before it is trained, what this replica trains next; returns those that were still free."""
        index = self._num_recorded.get(iteration, 0)
        granted = self._run(
            self._ledger.trainer.record_micro_batch(self.job_id, self._epoch, iteration, self._rank, index, group_ids)
        )
        self._num_recorded[iteration] = index + bool(granted)
        return granted

    # ---- the barrier ---------------------------------------------------------------------------------------------

    def commit(self, commit: Commit) -> bool:
        """Close the iteration and count the next version. Return False when it was committed before a crash."""
        self.doing = f"committing iteration {commit.iteration}"
        report: dict[str, Any] = commit.metrics | {"spans": to_record(commit.spans, self._clock_offset_s())}
        version = commit.snapshot.policy_version
        is_new = self._run(
            self._ledger.trainer.commit(
                self.job_id,
                self._epoch,
                commit.iteration,
                version,
                commit.snapshot.manifest.digest.hex(),
                report,
                commit.used,
                is_published=commit.is_published,
                advantages=commit.advantages,
            )
        )
        num_updates = self.config.training.num_updates_per_iteration
        self._meter.record(version, num_updates, commit.metrics, commit.spans)
        return is_new

    def _clock_offset_s(self) -> float:
        """Return the Unix time of Redis minus time.monotonic() here, off by half a round trip at most."""
        asked_at = time.monotonic()
        redis_time = self._run(self._ledger.now())
        return redis_time - (asked_at + time.monotonic()) / 2

    def checkpointed(self, first: int, next_iteration: int, path: str) -> None:
        self._run(self._ledger.trainer.checkpointed(self.job_id, self._epoch, first, next_iteration, path))

    def wait_for_evaluation(self) -> None:
        """Keep serving the last version until it is evaluated. Give up, with an event, after a deadline."""
        last, deadline_s = self.config.schedule.num_iterations, self.config.schedule.iteration_deadline_s
        deadline = time.monotonic() + deadline_s
        self.doing = "waiting for the last evaluation" if self.config.evaluation else "ending the job"
        while self.config.evaluation is not None and not self._is_evaluated(last):
            self.check()
            if time.monotonic() > deadline:
                if self._rank > 0:
                    return
                self.emit(
                    "evaluation.missed", f"the last evaluation did not end within {deadline_s:.0f} s; the job does"
                )
                return
            time.sleep(0.25)

    def _is_evaluated(self, evaluation: int) -> bool:
        state = self._run(self._ledger.evaluations.state(self.job_id, evaluation))
        return state is not None and state.is_over

    def emit(self, kind: str, message: str) -> None:
        self._run(self._ledger.event_log.emit(self.job_id, kind, message))

    def ask(self, question: Callable[[Ledger], Coroutine[Any, Any, T]]) -> T:
        """Ask the ledger from a thread that does not train: no sign of progress. Raises RedisError, TimeoutError."""
        return self._background.run(question(self._ledger))

    def close(self) -> None:
        """Stop serving and give the lease back, so that another trainer need not wait for it to run out."""
        if self._watchdog is not None:
            self._watchdog.close()
        self._background.cancel(self._heartbeat)
        if self._server is not None:
            self._background.run(self._server.stop())
        if self._lost is None and self._rank == 0:
            try:
                self._background.run(self._ledger.trainer.renew_job(self.job_id, self._epoch, 0.0), timeout_s=5)
            except (LeaseLost, RedisError, TimeoutError):
                logger.warning("the lease of job %s was not handed back; it runs out by itself", self.job_id)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        result = self._background.run(coroutine)
        self.progress()
        return result
