"""From weights to versions: snapshot, publish, commit, checkpoint."""

import logging
from dataclasses import replace

from onbeat.config import BoundedSchedule, JobConfig
from onbeat.errors import JobFailed
from services.trainer.checkpoint import CheckpointStore, TrainState
from services.trainer.distributed import World
from services.trainer.link import Link
from services.trainer.policy import Policy, has_old_policies
from services.trainer.stats import IterationStats
from services.trainer.weight_store import Snapshot, take_snapshot

logger = logging.getLogger(__name__)


class Publisher:
    """Of a job's training; every rank has one, and only rank 0's speaks to the job."""

    def __init__(
        self,
        link: Link,
        config: JobConfig,
        policy: Policy,
        state: TrainState,
        checkpoints: CheckpointStore,
        files: dict[str, bytes],
        world: World,
    ) -> None:
        self.state = state
        self._link, self._config, self._policy, self._world = link, config, policy, world
        self._checkpoints, self._files = checkpoints, files
        self._durable_until = state.next_iteration  # iterations before this one are in a checkpoint
        self._newest: Snapshot | None = None  # what a checkpoint exports; on rank 0 if sharded

    def start(self) -> None:
        """What rollouts may ask for when training starts here: the newest version, and those of open iterations."""
        current = self._snapshot()
        if not self._world.is_main:
            return
        assert current is not None
        held = self._policy.old.snapshots | {current.policy_version: current}
        for version in sorted(held):
            snapshot = held[version]
            assert snapshot is not None, "rank 0 has them all"
            if version < self.state.published_version:
                self._link.hold(snapshot)
            if version == self.state.published_version:
                self._link.publish(snapshot)

    def commit(self, iteration: int, stats: IterationStats) -> None:
        """The iteration is over: publish its version, unless it has hardly moved (`bounded` only), and commit."""
        version, num_steps = self.state.policy_version + 1, self._policy.optimizer.num_steps
        self.state = replace(self.state, next_iteration=iteration + 1, policy_version=version, num_steps=num_steps)
        with stats.busy("train/snapshot_s"):
            snapshot = self._snapshot()
        stats.merge(self._world.others(stats.to_bytes()))
        if is_published := self._is_worth_publishing(stats):
            self.state = replace(self.state, published_version=version)
        if self._world.is_main:
            assert snapshot is not None
            if is_published:
                self._link.publish(snapshot)
            report = stats.report(self._world.size)
            is_new = self._link.commit(iteration, snapshot, report, is_published)
            log_iteration(iteration, report, is_new)
        self._tell_durable()
        self._checkpoint_if_due()

    def finish(self) -> None:
        """Returns when everything is on disk. Raises JobFailed when it cannot be written."""
        self._checkpoints.wait()
        self._tell_durable()

    def _is_worth_publishing(self, stats: IterationStats) -> bool:
        """Divergence-triggered publishing (arXiv 2507.10990). The bound comes first: no iteration may wait for ever."""
        schedule = self._config.schedule
        if not isinstance(schedule, BoundedSchedule) or schedule.publish_above_kl is None:
            return True
        is_due = self.state.policy_version - self.state.published_version >= schedule.max_staleness
        is_last = self.state.next_iteration == schedule.num_iterations  # it is evaluated, and what users want
        return is_due or is_last or stats.divergence > schedule.publish_above_kl

    def _snapshot(self) -> Snapshot | None:
        """Of the weights as they are now; held where a later ratio may need them. Of a sharded model on rank 0 only.

        Raises JobFailed when replicas, which must hold the same bits, do not.
        """
        version, tensors = self.state.policy_version, self._policy.published()
        if self._policy.is_sharded and not self._world.is_main:
            for _ in tensors:  # gathered with the others
                pass
            snapshot = None
        else:
            snapshot = take_snapshot(version, tensors)
        if snapshot is not None and not self._policy.is_sharded:
            digest = snapshot.manifest.digest
            if any(other != digest for other in self._world.others(digest)):
                raise JobFailed(f"the trainer's replicas hold different weights of version {version}; start them again")
        self._newest = snapshot
        if has_old_policies(self._config):
            self._policy.old.hold(version, snapshot, self.state.next_iteration - self._config.max_staleness)
        return snapshot

    def _checkpoint_if_due(self) -> None:
        done = self.state.next_iteration
        is_last = done == self._config.schedule.num_iterations
        if not is_last and done % self._config.checkpoint.every_iterations:
            return
        snapshots = self._policy.old.snapshots.items()
        older = {version: held.tensors() for version, held in snapshots if held and version < self.state.policy_version}
        weights = self._newest.tensors() if self._newest else ()
        self._checkpoints.save(self.state, weights, self._policy.state_tensors(), self._files, older)

    def _tell_durable(self) -> None:
        """Checkpoints are written in the background; only on disk do they let go of the groups that they contain."""
        for next_iteration, path in self._checkpoints.finished():
            if self._world.is_main:
                self._link.checkpointed(self._durable_until, next_iteration, str(path))
            self._durable_until = next_iteration


def log_iteration(iteration: int, report: dict[str, float], is_new: bool) -> None:
    logger.info(
        "iteration %d: reward %.3f, grad norm %.3g, mismatch %.4f, trained %d tokens in %.2f s%s",
        iteration,
        report["reward_mean"],
        report["train/grad_norm"],
        report.get("mismatch_mean", 0.0),
        report["train/trained_tokens"],
        report["train_s"],
        "" if is_new else " (replayed)",
    )
