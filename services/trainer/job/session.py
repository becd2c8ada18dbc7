"""A live job as its training loop sees it: groups come in, weights go out, and iterations are committed."""

import json
import time
from collections.abc import Container
from typing import Any

from onbeat.contracts.errors import WeightsError
from onbeat.contracts.records import PublishedWeights
from onbeat.contracts.states import IterationState, JobState
from onbeat.machine.memory import read_memory
from onbeat.streams.codec import RolloutGroup
from onbeat.weights.host import host_id
from onbeat.weights.security import join_address, reachable_host
from onbeat.weights.wire import Peer
from services.trainer.job.interface import CannotServe, Commit
from services.trainer.job.lease import Lease
from services.trainer.job.meters import CommitMeter
from services.trainer.rows import RowRecorder
from services.trainer.settings import Settings
from services.trainer.spans import to_record
from services.trainer.supervised import SupervisedRow
from services.trainer.weights.relay_tree import Sources
from services.trainer.weights.server import WeightServer
from services.trainer.weights.store import Snapshot, WeightStore, num_served
from services.trainer.world import World


class GroupSource:
    """The source of a replica's groups. Every method raises LeaseLost once another trainer owns the job."""

    def __init__(self, lease: Lease) -> None:
        self._lease, self._ledger, self._job = lease, lease.ledger, lease.job
        self._consumer = f"rank-{self._job.rank}"  # stable, so that a successor finds what its predecessor had taken
        self._num_recorded: dict[int, int] = {}  # iteration -> micro-batches under this rank

    def take(self, count: int, timeout_s: float) -> list[RolloutGroup]:
        """Return up to `count` accepted groups in completion order, or an empty list when none came in time."""
        return self._lease.run(self._ledger.trainer.take(self._job.id, self._consumer, count, timeout_s))

    def num_opened(self) -> int:
        """Return the number of iterations that have been opened so far."""
        return int(self._lease.run(self._ledger.jobs.fields(self._job.id))["num_opened"])

    def accepted(self, iteration: int, known: Container[str] = ()) -> list[RolloutGroup]:
        """Return the accepted groups of an iteration, in completion order, including those taken before. Those that
        are `known` (ids) are not read."""
        return self._lease.run(self._ledger.iterations.accepted_groups(self._job.id, iteration, known))

    def policy_version(self, iteration: int) -> int:
        """Return the one policy version of an open iteration."""
        version = self._lease.run(self._ledger.iterations.policy_version(self._job.id, iteration))
        assert version is not None, f"iteration {iteration} is not open"
        return version

    def dispatched(self, iteration: int) -> set[str]:
        """Return the ids of all groups of the iteration so far; none before it is open."""
        return set(self._lease.run(self._ledger.iterations.groups(self._job.id, iteration)))

    def is_drained(self, iteration: int) -> bool:
        """Return whether every group of the iteration is accepted."""
        return self._lease.run(self._ledger.iterations.state(self._job.id, iteration)) is not IterationState.OPEN

    def recorded_micro_batches(self, iteration: int) -> list[list[str]]:
        """Return the micro-batches of this replica and of replicas that have gone, in the order of recording."""
        recorded = self._lease.run(self._ledger.iterations.micro_batches(self._job.id, iteration))
        self._num_recorded = {iteration: sum(rank == self._job.rank for rank, _ in recorded)}
        return [group_ids for rank, group_ids in recorded if rank % self._job.num_replicas == self._job.rank]

    def taken(self, iteration: int) -> set[str]:
        """Return the ids of the groups that are in a micro-batch of any replica."""
        return self._lease.run(self._ledger.iterations.taken_groups(self._job.id, iteration))

    def record_micro_batch(self, iteration: int, group_ids: list[str]) -> list[str]:
        """Record, before it is trained, what this replica trains next. Return the groups that were still free."""
        index, job = self._num_recorded.get(iteration, 0), self._job
        recording = self._ledger.trainer.record_micro_batch(job.id, job.epoch, iteration, job.rank, index, group_ids)
        granted = self._lease.run(recording)
        self._num_recorded[iteration] = index + bool(granted)
        return granted


class JobSession:
    """A job's session, valid while the lease is held. Its methods raise LeaseLost once another trainer owns the job."""

    def __init__(self, lease: Lease) -> None:
        self.lease, self.status, self.groups = lease, lease.status, GroupSource(lease)
        self.job_id, self.config = lease.job.id, lease.job.config
        self._ledger, self.epoch = lease.ledger, lease.job.epoch
        self._store = WeightStore(num_served(self.config))
        self._server: WeightServer | None = None
        self._address = ""
        self._meter = CommitMeter()
        self.rows: RowRecorder | None = None  # recorder on rank 0, in a job with supervised iterations

    def check(self) -> JobState:
        """Return the job's state. Raises LeaseLost, JobCancelled, Stopped, or what broke the heartbeat."""
        return self.lease.check()

    def record_rows(self, iteration: int) -> None:
        """Record the tokens of a supervised iteration's rows, once it is open, unless they are recorded."""
        assert self.rows is not None, "a job with supervised iterations has a recorder"
        self.rows.record(iteration)

    def held_out_rows(self) -> list[SupervisedRow]:
        """Return the rows on which the job measures its loss."""
        assert self.rows is not None, "a job with supervised iterations has a recorder"
        return self.rows.held_out()

    def num_committed(self) -> int:
        """Return the number of committed iterations; of a fork, those of its parent count, too."""
        return int(self.lease.run(self._ledger.jobs.fields(self.job_id))["next_iteration"])

    def emit(self, kind: str, message: str) -> None:
        self.lease.run(self._ledger.event_log.emit(self.job_id, kind, message))

    def record_teacher(self, digest: str) -> str:
        """Record the teacher's digest if the job has none yet; return the recorded one."""
        return self.lease.run(self._ledger.trainer.record_teacher(self.job_id, self.epoch, digest))

    def record_row_tokens(self, num_tokens: int, reason: str) -> int:
        """Record the tokens of a packed row if the job has no number yet; return the recorded one."""
        return self.lease.run(self._ledger.trainer.record_row_tokens(self.job_id, self.epoch, num_tokens, reason))

    def num_engines_to_come(self) -> int:
        """Return how many rollouts of the pool on this machine have no model in their engine yet."""
        if not self.config.has_rollouts:
            return 0
        here, now = read_memory().name, self.lease.run(self._ledger.now())
        rollouts = self.lease.run(self._ledger.workers.records(self.config.pool))
        to_come = [rollout for rollout in rollouts if rollout.policy_version is None and rollout.state != "unsuited"]
        to_come = [rollout for rollout in to_come if rollout.is_alive(now) or rollout.is_starting(now)]
        return sum(rollout.host is not None and rollout.host.name == here for rollout in to_come)

    def close(self, is_handover: bool = False) -> None:
        """Stop serving and give the lease back. `is_handover`: see `Lease.close`."""
        try:
            if self._server is not None:
                self.lease.run(self._server.stop())
        finally:
            self.lease.close(is_handover)

    # ---- weights -------------------------------------------------------------------------------------------------

    def serve_weights(self, files: dict[str, bytes], settings: Settings, shards: World) -> None:
        """Serve weights on rank 0 and on every rank of `shards`: each what it holds, and rank 0 knows who holds what.

        Raises CannotServe on all of them when a port is taken or certificates are not usable.
        """
        rank = self.lease.job.rank
        if rank > 0 and shards.size == 1:
            return
        port, problem = settings.weights_port + rank if settings.weights_port else 0, ""
        try:
            security = settings.wire_security()
            server = WeightServer(self.job_id, files, self._store, security, settings.weights_max_calls)
            bound = self.lease.run(server.start(settings.weights_host, port))
        except (WeightsError, ValueError) as error:
            problem = str(error)
            self.emit("trainer.failed", f"{settings.trainer_id} ends: {problem}")
        for of_rank in shards.all_gather_bytes(problem.encode()):
            if of_rank:
                raise CannotServe(f"job {self.job_id} is left to another trainer: {of_rank.decode()}")
        self._server = server
        self._address = join_address(reachable_host(settings.weights_host, settings.weights_advertise), bound)
        peer = Peer(
            worker_id=settings.trainer_id, address=self._address, host_id=host_id(), zone=settings.zone
        ).SerializeToString()
        roots = [Peer.FromString(message) for message in shards.all_gather_bytes(peer)]
        server.sources = Sources(roots, settings.weights_egress, settings.weights_fanout)

    def hold(self, snapshot: Snapshot, delta_bytes: int | None) -> None:
        """Let rollouts pull this version, without announcing it. `delta_bytes`: of all shards; None: in full only."""
        self._store.add(snapshot, delta_bytes)

    def withdraw(self) -> None:
        """Serve no version until the next one is held: rollouts need none, and their bytes are about to change."""
        self.lease.run(self._store.withdraw())

    def publish(self, snapshot: Snapshot, published: PublishedWeights) -> None:
        """Announce this version, which is held: rollouts pull it from now on."""
        self.status.publish(snapshot.policy_version)
        assert self._server is not None
        version, digest = snapshot.policy_version, snapshot.manifest.digest.hex()
        versions = self._ledger.versions  # first: a successor must know which bits rollouts may have
        self.lease.run(versions.announce(self.job_id, self.epoch, version, self._address, digest, published))
        self.lease.run(self._server.announce())

    # ---- the barrier ---------------------------------------------------------------------------------------------

    def commit(self, commit: Commit) -> bool:
        """Close the iteration and count the next version. Return False when it was committed before a crash."""
        self.status.commit(commit.iteration)
        report: dict[str, Any] = commit.metrics | {"spans": to_record(commit.spans, self._clock_offset_s())}
        version = commit.snapshot.policy_version
        is_new = self.lease.run(
            self._ledger.trainer.commit(
                self.job_id,
                self.epoch,
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
        redis_time = self.lease.run(self._ledger.now())
        return redis_time - (asked_at + time.monotonic()) / 2

    def checkpointed(self, first: int, next_iteration: int, path: str) -> None:
        self.lease.run(self._ledger.trainer.checkpointed(self.job_id, self.epoch, first, next_iteration, path))

    def wait_for_evaluation(self, evaluation: int) -> dict[str, float]:
        """Keep serving weights until this version is evaluated, and earlier ones whose evaluation was opened late.
        Return its scores. Give up, with an event, after a deadline."""
        last, deadline_s = self.config.schedule.num_iterations, self.config.schedule.iteration_deadline_s
        deadline = time.monotonic() + deadline_s
        if evaluation == last:
            self.status.end(has_evaluation=self.config.evaluation is not None)
        else:
            self.status.wait_for_evaluation(evaluation)
        while self.config.evaluation is not None and not self._is_evaluated(evaluation):
            if self.check() is JobState.PAUSED:
                deadline = time.monotonic() + deadline_s
            if time.monotonic() > deadline:
                if self.lease.job.rank == 0:
                    name = "the last evaluation" if evaluation == last else f"evaluation {evaluation}"
                    then = "the job does" if evaluation == last else "training goes on"
                    self.emit("evaluation.missed", f"{name} did not end within {deadline_s:.0f} s; {then}")
                return {}
            time.sleep(0.25)
        fields = self.lease.run(self._ledger.evaluations.fields(self.job_id, evaluation))
        scores: dict[str, float] = json.loads(fields.get("scores", "{}"))
        return scores

    def _is_evaluated(self, evaluation: int) -> bool:
        """Return whether this evaluation is over, and no other is open."""
        evaluations = self._ledger.evaluations
        state = self.lease.run(evaluations.state(self.job_id, evaluation))
        return state is not None and state.is_over and not self.lease.run(evaluations.open_ones(self.job_id))
