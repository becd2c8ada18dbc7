"""The training loop's link to its job: lease, groups in, weights out. Synchronous face of the ledger."""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol, TypeVar

import torch
from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.errors import LeaseLost, OnbeatError
from onbeat.streams.codec import RolloutGroup
from onbeat.streams.ledger import Ledger
from onbeat.types import JobState
from services.trainer.background import Background
from services.trainer.weight_server import WeightServer
from services.trainer.weight_store import Snapshot, WeightStore

logger = logging.getLogger(__name__)

T = TypeVar("T")
CONSUMER = "rank-0"  # stable, so that whoever takes over finds what its predecessor had taken


class JobCancelled(Exception):
    """The user cancelled; stop at the next safe point."""


class Stopped(Exception):
    """This process was asked to stop; the job goes on elsewhere."""


class Link(Protocol):
    """What the training loop needs of its job: live (`JobLink`) or recorded (`replay.RecordedLink`)."""

    job_id: str
    config: JobConfig

    def check(self) -> JobState: ...
    def accepted_groups(self, first_iteration: int) -> list[RolloutGroup]: ...
    def take_groups(self, timeout_s: float) -> list[RolloutGroup]: ...
    def recorded_micro_batches(self, iteration: int) -> list[list[str]]: ...
    def record_micro_batch(self, iteration: int, index: int, group_ids: list[str]) -> None: ...
    def snapshot(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Snapshot: ...
    def announce(self, snapshot: Snapshot) -> None: ...
    def commit(self, iteration: int, snapshot: Snapshot, metrics: dict[str, float]) -> bool: ...
    def checkpointed(self, first: int, next_iteration: int, path: str) -> None: ...


class JobLink:
    """Valid while the lease is held. Every method raises LeaseLost once another trainer owns the job."""

    def __init__(
        self,
        background: Background,
        ledger: Ledger,
        job_id: str,
        epoch: str,
        config: JobConfig,
        lease_s: float,
        stop: threading.Event,
    ) -> None:
        self.job_id, self.config = job_id, config
        self._background, self._ledger, self._epoch, self._lease_s, self._stop = (
            background,
            ledger,
            epoch,
            lease_s,
            stop,
        )
        self._state = JobState.RUNNING
        self._lost: Exception | None = None
        self._store = WeightStore()
        self._server: WeightServer | None = None
        self._address = ""
        self._heartbeat = background.start(self._keep_lease())

    async def _keep_lease(self) -> None:
        """Renew in time, and notice a cancel within a second. A failure ends it: `check` raises it while training."""
        try:
            while True:
                self._state = await self._ledger.renew_job(self.job_id, self._epoch, self._lease_s)
                await asyncio.sleep(min(0.25, self._lease_s / 3))
        except (OnbeatError, RedisError) as error:
            self._lost = error

    def check(self) -> JobState:
        """The job's state; raises LeaseLost, JobCancelled, Stopped, or what broke the heartbeat."""
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

    def serve_weights(self, files: dict[str, bytes], host: str, port: int, advertise: str) -> None:
        async def start() -> tuple[WeightServer, int]:
            server = WeightServer(self.job_id, files, self._store)
            return server, await server.start(host, port)

        self._server, bound = self._background.run(start())
        self._address = f"{advertise or host}:{bound}"

    def snapshot(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Snapshot:
        """Copy the weights into the store; nobody is told before `announce` or `commit`."""
        return self._store.publish(version, tensors)

    def announce(self, snapshot: Snapshot) -> None:
        """Rollouts may pull this version from now on."""
        assert self._server is not None
        version, digest = snapshot.manifest.policy_version, snapshot.manifest.digest.hex()
        self._background.run(self._server.announce())
        self._run(self._ledger.announce_version(self.job_id, self._epoch, version, self._address, digest))

    # ---- groups --------------------------------------------------------------------------------------------------

    def take_groups(self, timeout_s: float) -> list[RolloutGroup]:
        """The next accepted groups in completion order; empty when none came in time."""
        return self._run(self._ledger.take_groups(self.job_id, CONSUMER, 64, timeout_s))

    def accepted_groups(self, first_iteration: int) -> list[RolloutGroup]:
        """All accepted groups from an iteration on, in completion order, whoever took them before."""

        async def collect() -> list[RolloutGroup]:
            open_iteration = int((await self._ledger.job_fields(self.job_id))["next_iteration"])
            groups = []
            for iteration in range(first_iteration, open_iteration + 1):
                groups += await self._ledger.iteration_groups(self.job_id, iteration)
            return groups

        return self._run(collect())

    def recorded_micro_batches(self, iteration: int) -> list[list[str]]:
        return self._run(self._ledger.recorded_micro_batches(self.job_id, iteration))

    def record_micro_batch(self, iteration: int, index: int, group_ids: list[str]) -> None:
        self._run(self._ledger.record_micro_batch(self.job_id, self._epoch, iteration, index, group_ids))

    # ---- the barrier ---------------------------------------------------------------------------------------------

    def commit(self, iteration: int, snapshot: Snapshot, metrics: dict[str, float]) -> bool:
        """Close the iteration and publish the next version. False when it was committed before a crash."""
        version, digest = snapshot.manifest.policy_version, snapshot.manifest.digest.hex()
        arguments = (self.job_id, self._epoch, iteration, version, digest, metrics)
        return self._run(self._ledger.commit_iteration(*arguments))

    def checkpointed(self, first: int, next_iteration: int, path: str) -> None:
        self._run(self._ledger.checkpointed(self.job_id, self._epoch, first, next_iteration, path))

    def emit(self, kind: str, message: str) -> None:
        self._run(self._ledger.emit(self.job_id, kind, message))

    def close(self) -> None:
        """Stop serving and give the lease back, so that another trainer need not wait for it to run out."""
        self._background.cancel(self._heartbeat)
        if self._server is not None:
            self._background.run(self._server.stop())
        if self._lost is None:
            try:
                self._background.run(self._ledger.renew_job(self.job_id, self._epoch, 0.0), timeout_s=5)
            except (LeaseLost, RedisError, TimeoutError):
                logger.warning("the lease of job %s was not handed back; it runs out by itself", self.job_id)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._background.run(coroutine)
