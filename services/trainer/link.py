"""The training loop's link to its job: lease, groups in, weights out. Synchronous face of the ledger."""

import asyncio
import logging
import threading
import time

from onbeat.config import JobConfig
from onbeat.errors import JobFailed, LeaseLost
from onbeat.streams.ledger import Delivery, Ledger
from onbeat.types import JobState
from services.trainer.background import Background
from services.trainer.weight_server import WeightServer
from services.trainer.weight_store import Snapshot, WeightStore

logger = logging.getLogger(__name__)

CONSUMER = "rank-0"  # stable, so that whoever takes over finds what its predecessor had taken


class JobCancelled(Exception):
    """The user cancelled; stop at the next safe point."""


class Stopped(Exception):
    """This process was asked to stop; the job goes on elsewhere."""


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
        """Renew three times per lease. The first failure ends it: `check` then raises in the training thread."""
        while self._lost is None:
            try:
                self._state = await self._ledger.renew_job(self.job_id, self._epoch, self._lease_s)
            except (LeaseLost, OSError) as error:
                self._lost = error
                return
            for _ in range(4):  # a cancel shows within a second, whatever the lease
                await asyncio.sleep(min(0.25, self._lease_s / 12))
                if self._lost is None:
                    self._state = await self._ledger.job_state(self.job_id)

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

    def snapshot(self, version: int, tensors) -> Snapshot:
        """Copy the weights into the store; nobody is told before `announce` or `commit`."""
        return self._store.publish(version, tensors)

    def announce(self, snapshot: Snapshot) -> None:
        """Rollouts may pull this version from now on."""
        assert self._server is not None
        version, digest = snapshot.manifest.policy_version, snapshot.manifest.digest.hex()
        self._background.run(self._server.announce())
        self._run(self._ledger.announce_version(self.job_id, self._epoch, version, self._address, digest))

    # ---- groups --------------------------------------------------------------------------------------------------

    def take_groups(self, timeout_s: float) -> list[Delivery]:
        return self._run(self._ledger.take_groups(self.job_id, CONSUMER, 64, timeout_s))

    def pending_groups(self) -> list[Delivery]:
        async def collect() -> list[Delivery]:
            return [delivery async for delivery in self._ledger.pending_groups(self.job_id, CONSUMER)]

        return self._run(collect())

    def recorded_micro_batches(self, iteration: int) -> list[list[str]]:
        return self._run(self._ledger.recorded_micro_batches(self.job_id, iteration))

    def record_micro_batch(self, iteration: int, group_ids: list[str]) -> None:
        self._run(self._ledger.record_micro_batch(self.job_id, self._epoch, iteration, group_ids))

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
            except (LeaseLost, OSError, TimeoutError):
                logger.warning("the lease of job %s was not handed back; it runs out by itself", self.job_id)

    def _run(self, coroutine):
        return self._background.run(coroutine)


class GroupFeed:
    """Groups of one iteration as micro-batches, in completion order and under a token budget.

    What was recorded before a crash is repeated exactly; from there on, `periodic` takes whatever has arrived and
    `sync` waits for all groups first. Either way the partition is written down before it is trained.
    """

    def __init__(self, link: JobLink, next_iteration: int) -> None:
        self._link = link
        self._waiting: list[Delivery] = [d for d in link.pending_groups() if d.group.iteration >= next_iteration]

    def micro_batches(self, iteration: int, num_groups: int, cost):
        """Yield lists of RolloutGroup; together exactly the iteration's `num_groups`. `cost(group)` is in tokens."""
        num_left = num_groups
        for group_ids in self._link.recorded_micro_batches(iteration):
            while not (wanted := self._pick(group_ids)):
                self._wait_for_more(iteration, num_left)
            num_left -= len(wanted)
            yield wanted
        while num_left > 0:
            self._receive(timeout_s=0.001)
            is_sync = self._link.config.schedule.mode == "sync"
            while self._num_waiting(iteration) < (num_left if is_sync else 1):
                self._wait_for_more(iteration, num_left)
            batch = self._take_budget(iteration, cost)
            self._link.record_micro_batch(iteration, [group.group_id for group in batch])
            num_left -= len(batch)
            yield batch

    def _pick(self, group_ids: list[str]):
        found = {d.group.group_id: d for d in self._waiting if d.group.group_id in group_ids}
        if len(found) < len(group_ids):
            return []
        self._waiting = [d for d in self._waiting if d.group.group_id not in found]
        return [found[group_id].group for group_id in group_ids]

    def _num_waiting(self, iteration: int) -> int:
        return sum(d.group.iteration == iteration for d in self._waiting)

    def _take_budget(self, iteration: int, cost):
        budget = self._link.config.training.max_tokens_per_micro_batch
        batch: list[Delivery] = []
        for delivery in self._waiting:
            if delivery.group.iteration != iteration:
                continue
            budget -= cost(delivery.group)
            if budget < 0 and batch:
                break
            batch.append(delivery)
        self._waiting = [d for d in self._waiting if d not in batch]
        return [d.group for d in batch]

    def _receive(self, timeout_s: float) -> bool:
        deliveries = self._link.take_groups(timeout_s)
        self._waiting += deliveries
        return bool(deliveries)

    def _wait_for_more(self, iteration: int, num_left: int) -> None:
        """Block until another group arrives. Raises JobFailed when none does for the iteration's deadline."""
        deadline_s = self._link.config.schedule.iteration_deadline_s
        deadline = time.monotonic() + deadline_s
        while not self._receive(timeout_s=0.5):
            if self._link.check() is JobState.PAUSED:
                deadline = time.monotonic() + deadline_s
            if time.monotonic() > deadline:
                raise JobFailed(
                    f"iteration {iteration}: no group arrived for {deadline_s:.0f} s, {num_left} are missing; "
                    "are rollouts running? (`onbeat workers`)"
                )
