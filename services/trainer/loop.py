"""The training loop: periodic asynchrony (arXiv 2511.18871).

    for each iteration t (one policy version, a fixed set of groups):
        for each update (all groups, or a share of them by their order):
            for each micro-batch of groups, in completion order, while others are still being generated:
                pack -> forward (policy, old, reference) -> loss sum -> backward     gradients add up unnormalised
            barrier: reduce over replicas -> rescale once -> GAC -> clip -> AdamW
        snapshot -> publish (version t + 1) -> commit

In `periodic` and `sync` the version is t itself, and the gradient at the barrier is that of the synchronous iteration
up to floating-point order: no step falls inside an update, the groups are fixed at its opening, and the normaliser
is applied once at the end. In `bounded` the version may be older, by max_staleness at most, and is the old policy.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from onbeat.config import BoundedSchedule, JobConfig
from onbeat.errors import JobFailed
from onbeat.streams.codec import RolloutGroup, span_versions
from onbeat.types import JobState
from services.trainer.algorithm.gac import GacAction
from services.trainer.algorithm.reinforce_pp import batch_scale
from services.trainer.batch import MicroBatch, Part, group_rewards, pack, rows
from services.trainer.checkpoint import CheckpointStore, TrainState
from services.trainer.feed import GroupFeed
from services.trainer.link import Link
from services.trainer.lora import published_tensors
from services.trainer.objective import Loss, compute_loss, loss_denominator, needs_whole_iteration
from services.trainer.policy import Policy, old_version
from services.trainer.stats import IterationStats
from services.trainer.weight_store import Snapshot, take_snapshot

logger = logging.getLogger(__name__)


class TrainLoop:
    def __init__(
        self,
        link: Link,
        config: JobConfig,
        policy: Policy,
        state: TrainState,
        checkpoints: CheckpointStore,
        files: dict[str, bytes],
    ) -> None:
        self._link, self._config, self._policy = link, config, policy
        self._state, self._checkpoints, self._files = state, checkpoints, files
        self._durable_until = state.next_iteration  # iterations before this one are in a checkpoint
        self._feed = GroupFeed(link, config, state.next_iteration)
        self._device = next(policy.model.parameters()).device
        self._behaviour_version: int | None = None  # of the iteration's groups, once the first is here
        self._num_updates_done = 0  # of the iteration

    def run(self) -> TrainState:
        self._publish_first()
        while self._state.next_iteration < self._config.schedule.num_iterations:
            self.run_iteration(self._state.next_iteration)
        self._link.wait_for_evaluation()
        while self._link.check() is JobState.PAUSED:  # paused in its last iteration: the user is to have the last word
            time.sleep(0.5)
        return self._state

    def run_iteration(self, iteration: int) -> None:
        stats = IterationStats(self._state.policy_version)
        self._behaviour_version, self._num_updates_done = None, 0
        updates: list[Iterable[list[RolloutGroup]]] = [
            self._feed.micro_batches(iteration, group_ids) for group_ids in shares(self._config, iteration)
        ]
        scale = 1.0
        if needs_whole_iteration(self._config.objective):
            updates = [list(micro_batches) for micro_batches in updates]
            scale = iteration_scale([group for update in updates for groups in update for group in groups])
        for micro_batches in updates:
            self.update(micro_batches, stats, scale)
        self.publish(iteration, stats)
        self.checkpoint_if_due()

    def update(self, micro_batches: Iterable[list[RolloutGroup]], stats: IterationStats, scale: float) -> None:
        """One optimizer step on its share of the iteration."""
        self._policy.optimizer.drop_gradients()
        stats.start_update()
        for groups in micro_batches:
            self._link.check()
            with stats.busy("train/micro_batches_s"):
                self.accumulate(groups, stats, scale)
        with stats.busy("train/step_s"):
            self.step(stats)
        self._num_updates_done += 1

    def accumulate(self, groups: list[RolloutGroup], stats: IterationStats, scale: float = 1.0) -> None:
        """Add one micro-batch's unnormalised gradient."""
        for group in groups:
            self._verify(group)
            stats.add_group(group)
        for row in rows(groups, self._config):
            self.accumulate_row(row, stats, scale)

    def accumulate_row(self, row: list[Part], stats: IterationStats, scale: float) -> None:
        batch = pack(row, self._device)
        loss_sum = self.loss(batch, stats, scale).loss_sum
        if not torch.isfinite(loss_sum):
            raise JobFailed(f"the loss is not finite ({loss_sum.item()}) in groups {', '.join(batch.group_ids)}")
        loss_sum.backward()

    def loss(self, batch: MicroBatch, stats: IterationStats, scale: float) -> Loss:
        """All policies on the same packed row, then the objective."""
        assert self._behaviour_version is not None, "rows are made of verified groups"
        behaviour, current = self._behaviour_version, self._state.policy_version
        version = old_version(self._config, behaviour, current, self._num_updates_done)
        logprobs, entropy = self._policy.logprobs(batch, self._config.rollout.temperature, version)
        loss = compute_loss(self._config.objective, batch, logprobs, scale)
        is_on_policy = behaviour == current and self._num_updates_done == 0
        has_behaviour = is_on_policy or version == behaviour
        stats.add_loss(batch, logprobs.trainer, logprobs.old if has_behaviour else None, loss, entropy)
        return loss

    def step(self, stats: IterationStats) -> None:
        """The barrier: exactly one rescale, one clip, one optimizer step."""
        tally = stats.tally
        if tally.num_responses == 0:
            raise JobFailed(f"every group of the update failed; the first one: {stats.first_failure}")
        divisor = loss_denominator(
            self._config, tally.num_tokens - tally.num_rejected_tokens, tally.num_responses, tally.num_pairs
        )
        optimizer = self._policy.optimizer
        decision = self._policy.control.apply(optimizer.rescale(divisor))
        stats.add_decision(decision)
        stats.values["train/grad_norm"] = optimizer.clip()
        if decision.action is GacAction.SKIP and self._config.gac.mode == "control":
            optimizer.drop_gradients()
        else:
            stats.values["train/learning_rate"] = optimizer.step()

    # ---- weights out -----------------------------------------------------------------------------------------------

    def publish(self, iteration: int, stats: IterationStats) -> None:
        """The next version: published, unless it has hardly moved (`bounded` only), and the iteration committed."""
        is_published = self._is_worth_publishing(stats)
        version = self._state.policy_version + 1
        self._state = replace(
            self._state,
            next_iteration=self._state.next_iteration + 1,
            policy_version=version,
            published_version=version if is_published else self._state.published_version,
            num_steps=self._policy.optimizer.num_steps,
        )
        with stats.busy("train/snapshot_s"):
            snapshot = self._snapshot()
        if is_published:
            self._link.publish(snapshot)
        report = stats.report()
        is_new = self._link.commit(iteration, snapshot, report, is_published)
        log_iteration(iteration, report, is_new)

    def _publish_first(self) -> None:
        """What rollouts may ask for when training starts here: the newest version, and those of open iterations."""
        current = self._snapshot()
        held = self._policy.old.snapshots | {current.policy_version: current}
        for version in sorted(held):
            if version < self._state.published_version:
                self._link.hold(held[version])
        self._link.publish(held[self._state.published_version])

    def _is_worth_publishing(self, stats: IterationStats) -> bool:
        """Divergence-triggered publishing (arXiv 2507.10990). The bound comes first: no iteration may wait for ever."""
        schedule = self._config.schedule
        if not isinstance(schedule, BoundedSchedule) or schedule.publish_above_kl is None:
            return True
        next_version = self._state.policy_version + 1
        is_due = next_version - self._state.published_version >= schedule.max_staleness
        return is_due or stats.divergence > schedule.publish_above_kl

    def _snapshot(self) -> Snapshot:
        snapshot = take_snapshot(self._state.policy_version, published_tensors(self._policy.model))
        if self._config.max_staleness or self._config.training.num_updates_per_iteration > 1:
            oldest_wanted = self._state.next_iteration - self._config.max_staleness
            self._policy.old.hold(snapshot, oldest_wanted)
        return snapshot

    def checkpoint_if_due(self) -> None:
        done = self._state.next_iteration
        is_last = done == self._config.schedule.num_iterations
        if not is_last and done % self._config.checkpoint.every_iterations:
            return
        tensors = self._policy.state_tensors()
        path = self._checkpoints.save(self._state, self._policy.model, tensors, self._files)
        self._link.checkpointed(self._durable_until, done, str(path))
        self._durable_until = done

    # ---- what may enter ----------------------------------------------------------------------------------------------

    def _verify(self, group: RolloutGroup) -> None:
        """The second of the two ends: the submission script has checked the same rule."""
        if group.HasField("failure"):
            if self._config.rollout.on_group_failure == "fail":
                raise JobFailed(f"group {group.group_id}: {group.failure.kind}: {group.failure.message}")
            return
        if self._behaviour_version is None:
            self._behaviour_version = group.policy_version
        newest = self._state.policy_version
        wanted, versions = self._behaviour_version, span_versions(group)
        if versions != [wanted] or not newest - self._config.max_staleness <= wanted <= newest:
            allowed = f"one version, {newest - self._config.max_staleness} to {newest}"
            raise JobFailed(f"group {group.group_id} has tokens of versions {versions}, wanted {wanted} ({allowed})")


def shares(config: JobConfig, iteration: int) -> list[list[str]]:
    """The groups of each update, by their order in the iteration and not by their arrival.

    5 prompts and 2 updates: [[t-0, t-1, t-2], [t-3, t-4]].
    """
    num_prompts, num_updates = config.rollout.num_prompts_per_iteration, config.training.num_updates_per_iteration
    updates: list[list[str]] = [[] for _ in range(num_updates)]
    for index in range(num_prompts):
        updates[index * num_updates // num_prompts].append(f"{iteration}-{index}")
    return updates


def iteration_scale(groups: list[RolloutGroup]) -> float:
    """REINFORCE++'s divisor, from all groups of the iteration; 1 when every group failed."""
    rewards = [group_rewards(group) for group in groups if group.responses]
    return batch_scale(rewards) if rewards else 1.0


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
