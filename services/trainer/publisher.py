"""The steps from weights to a policy version: snapshot, publish, commit, checkpoint."""

import json
import logging
import math
import time
from dataclasses import replace

from onbeat.config import BoundedSchedule, JobConfig
from onbeat.contracts.errors import JobFailed
from onbeat.contracts.records import PublishedWeights
from onbeat.contracts.response_stats import more_parts
from onbeat.machine.malloc import give_back_if_scarce
from onbeat.streams.codec import used_digest
from services.trainer.checkpoints.saver import CheckpointSaver
from services.trainer.checkpoints.store import CheckpointStore, TrainState
from services.trainer.job.interface import Commit, TrainingJob
from services.trainer.policy import Policy, has_old_policies, is_served_in_place
from services.trainer.spans import Span
from services.trainer.stats import IterationStats
from services.trainer.weights.store import Snapshot, SnapshotWriter

logger = logging.getLogger(__name__)


class Publisher:
    """The publisher of a job's policy versions. Every rank has one; only that of rank 0 writes to the ledger."""

    def __init__(
        self, job: TrainingJob, config: JobConfig, policy: Policy, state: TrainState, checkpoints: CheckpointStore
    ) -> None:
        self.state = state
        self._job, self._config, self._policy, self._world = job, config, policy, policy.world
        self._saver = CheckpointSaver(job, policy, checkpoints, state.next_iteration)
        self._shard = policy.published_shard()  # the tensors that this rank holds of a version
        self._newest: Snapshot | None = None  # the newest version, which checkpoints export
        self._published: Snapshot | None = None  # the one that rollouts have, if served here; base of the next delta
        self._writer: SnapshotWriter | None = None  # the writer of the version that the optimizer makes
        self._written: set[str] = set()  # names of parameters that the last step has finished
        self._last_checkpoint: list[Span] = []  # the span of a checkpoint is recorded with the next commit

    @property
    def _is_serving(self) -> bool:
        return self._policy.is_sharded or self._world.is_main

    @property
    def _is_in_place(self) -> bool:
        """True if a snapshot is the parameters themselves, valid until their next step."""
        is_host = next(self._policy.model.parameters()).device.type == "cpu"
        return is_host and not self._policy.is_sharded and is_served_in_place(self._config)

    def start(self) -> None:
        """Serve what rollouts may ask for when training starts: the newest version, and those of open iterations."""
        current = self._snapshot()
        held = self._policy.old.snapshots | {current.policy_version: current}
        for version in sorted(held):
            if version < self.state.published_version and self._is_serving:
                self._job.hold(held[version], None)
            if version == self.state.published_version:
                self._publish(held[version])
        if self._published is None and self._config.is_supervised(self.state.next_iteration):
            self._publish(current)  # the published version went with another trainer, and rollouts ask for a model

    def wait_for_reader(self) -> None:
        """Wait until no checkpoint reads the state that the next step changes."""
        self._saver.wait_for_reader()

    def begin_version(self) -> None:
        """Begin the version that the iteration's last step makes: its parameters are copied and encoded meanwhile.

        With LoRA the published weights are not the parameters, and are all taken after the step.
        """
        if self._config.lora is None:
            self._writer = self._new_writer(self.state.policy_version + 1)
            if self._is_in_place:
                self._job.withdraw()

    def keep(self, names: list[str]) -> None:
        """Copy what the delta of a version in place needs of parameters that are about to be stepped."""
        if self._writer is not None and self._is_in_place:
            for name in names:
                self._writer.keep(name, self._policy.published_parameter(name))

    def put(self, names: list[str]) -> None:
        """Take stepped parameters into the version, if one has begun; the same ones, in this order, on every rank."""
        if self._writer is None:
            return
        self._written.update(names)
        for name in names:
            tensor = self._policy.published_parameter(name)
            if name in self._shard:
                self._writer.put(name, tensor)

    def finish_version(self, iteration: int, stats: IterationStats) -> Snapshot:
        """Take what is left of the version into its snapshot, and count the iteration, with `stats` of all replicas."""
        version, num_steps = self.state.policy_version + 1, self._policy.optimizer.num_steps
        self.state = replace(self.state, next_iteration=iteration + 1, policy_version=version, num_steps=num_steps)
        self._job.status.make_version(version)
        with stats.busy("train/snapshot_s"):
            give_back_if_scarce()  # the version takes memory now,
            snapshot = self._snapshot()
            give_back_if_scarce()  # and then rollouts on this machine do
        stats.merge(self._world.all_gather_bytes(stats.to_bytes()))
        has_signal = stats.has_signal or self._config.teacher is not None
        num_without_signal = 0 if has_signal else self.state.num_without_signal + 1
        parts = more_parts(self.state.reward_parts, stats.responses.parts)
        self.state = replace(self.state, reward_parts=parts, num_without_signal=num_without_signal)
        return snapshot

    def publish(self, snapshot: Snapshot, stats: IterationStats) -> bool:
        """Publish the version and return True, unless it has hardly moved (`bounded` only)."""
        if not self._is_worth_publishing(stats):
            return False
        self.state = replace(self.state, published_version=snapshot.policy_version)
        with stats.span("publish"):
            self._publish(snapshot)
        return True

    def commit(self, snapshot: Snapshot, stats: IterationStats, is_published: bool) -> None:
        """Commit the iteration, and begin a checkpoint if one is due."""
        if self._world.is_main:
            commit = Commit(
                iteration=self.state.next_iteration - 1,
                snapshot=snapshot,
                metrics=stats.report(self._world.size, self.state.reward_parts),
                used=used_digest(stats.digests),
                is_published=is_published,
                spans=self._last_checkpoint + stats.spans,
                advantages=stats.shown_advantages(),
            )
            log_iteration(commit, is_new=self._job.commit(commit))
        self._saver.report_finished()
        started = time.monotonic()
        has_written = self._saver.save_if_due(self._config, self.state, snapshot)
        self._last_checkpoint = [Span("checkpoint", started, time.monotonic())] if has_written else []

    def finish(self) -> None:
        """Wait until everything is on disk. Raises JobFailed if writing fails in repeated attempts."""
        assert self._newest is not None, "finish before start"
        self._saver.finish(self.state, self._newest)

    def leave(self) -> bool:
        """Write a checkpoint before the job stops early or this process ends. Return whether it is on disk."""
        assert self._newest is not None, "leave before start"
        return self._saver.leave(self.state, self._newest)

    def _is_worth_publishing(self, stats: IterationStats) -> bool:
        """Decide by divergence (arXiv 2507.10990), but always publish when the staleness bound requires it, and the
        versions that are to be evaluated."""
        schedule, version = self._config.schedule, self.state.next_iteration
        is_wanted = version in schedule.ends or self._config.is_evaluated(version)  # users want the last one
        if self._config.is_supervised(version):  # the next iteration needs no engine
            return is_wanted
        if not isinstance(schedule, BoundedSchedule) or schedule.publish_above_kl is None:
            return True
        is_due = self.state.policy_version - self.state.published_version >= schedule.max_staleness
        return is_due or is_wanted or stats.divergence > schedule.publish_above_kl

    def _new_writer(self, version: int) -> SnapshotWriter:
        memory = None if self._newest is None else self._newest.memory  # a rank that serves nothing has published none
        return SnapshotWriter(version, self._published, self._is_in_place, memory)

    def _snapshot(self) -> Snapshot:
        """Take a snapshot of the current weights (this rank's part of a sharded model); keep it if ratios will need it.

        Raises JobFailed when replicas do not hold the same bits.
        """
        version = self.state.policy_version
        writer, self._writer = self._writer or self._new_writer(version), None
        for name, tensor in self._policy.published(skip=self._written):
            if name in self._shard:
                writer.put(name, tensor)
        self._written = set()
        if self._policy.is_sharded:
            snapshot = writer.finish(self._shard, self._world)
        else:
            snapshot = writer.finish(self._shard)
            digest = snapshot.manifest.digest
            if len(set(self._world.all_gather_bytes(digest))) > 1:
                raise JobFailed(f"the trainer's replicas hold different weights of version {version}; start them again")
        self._newest = snapshot
        if self._policy.started is not None and version == self._config.num_supervised:
            self._policy.started.hold(snapshot, oldest_wanted=0)
        if has_old_policies(self._config):
            self._policy.old.hold(snapshot, self.state.next_iteration - self._config.max_staleness)
        return snapshot

    def _publish(self, snapshot: Snapshot) -> None:
        """Serve the version on all ranks that hold a part of it; then rank 0 announces it to rollouts."""
        if not self._is_serving:
            return
        holders = self._policy.holders
        delta_bytes = snapshot.delta.plan.size_bytes if snapshot.delta else None
        report = json.dumps({"delta_bytes": delta_bytes, "encode_s": snapshot.encode_s}).encode()
        everywhere = [json.loads(message) for message in holders.all_gather_bytes(report)]
        if delta_bytes is not None:
            delta_bytes = sum(shard["delta_bytes"] for shard in everywhere)
        if self._is_in_place:  # the previous version is still served when there was no step
            self._job.withdraw()
        self._job.hold(snapshot, delta_bytes)
        holders.all_gather_bytes(b"held")
        if self._world.is_main:
            published = PublishedWeights(
                full_bytes=snapshot.manifest.size_bytes,
                delta_bytes=delta_bytes,
                encode_s=max(shard["encode_s"] for shard in everywhere),
                publish_s=time.monotonic() - snapshot.started_at,
            )
            self._job.publish(snapshot, published)
        self._published = snapshot


def log_iteration(commit: Commit, is_new: bool) -> None:
    report = commit.metrics
    if (loss := report.get("sft/loss")) is not None:
        text = "iteration %d: loss of examples %.4f, grad norm %.3g, learned %d tokens in %.2f s%s"
        times = (report["train/grad_norm"], report["train/trained_tokens"], report["train_s"])
        logger.info(text, commit.iteration, loss, *times, "" if is_new else " (replayed)")
        return
    logger.info(
        "iteration %d: reward %.3f, grad norm %.3g, mismatch %.4f, trained %d tokens in %.2f s%s",
        commit.iteration,
        report.get("reward_mean", math.nan),
        report["train/grad_norm"],
        report.get("mismatch_mean", 0.0),
        report["train/trained_tokens"],
        report["train_s"],
        "" if is_new else " (replayed)",
    )
