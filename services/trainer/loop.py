"""The training loop: periodic asynchrony (arXiv 2511.18871).

    for each iteration t (policy version t, a fixed set of groups):
        for each micro-batch of groups, in completion order, while others are still being generated:
            pack -> forward (policy, reference) -> loss sum -> backward     gradients add up unnormalised
        barrier: rescale once -> clip -> AdamW -> snapshot -> commit (version t + 1 is published)

The gradient at the barrier is that of the synchronous iteration up to floating-point order, because no step falls
inside an iteration, the set of groups is fixed at its opening, and the normaliser is applied once at the end.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from onbeat.config import JobConfig
from onbeat.errors import JobFailed
from onbeat.streams.codec import RolloutGroup, span_versions
from onbeat.types import JobState
from services.trainer.algorithm.gac import GacAction
from services.trainer.batch import MicroBatch, is_informative, num_places, pack
from services.trainer.checkpoint import CheckpointStore, TrainState
from services.trainer.feed import GroupFeed
from services.trainer.gradient_control import GradientControl
from services.trainer.link import Link
from services.trainer.model import freeze_copy, response_logprobs
from services.trainer.objective import (
    Logprobs,
    Loss,
    compute_loss,
    iteration_scale,
    loss_denominator,
    needs_reference,
    needs_whole_iteration,
)
from services.trainer.optimizer import MasterAdamW
from services.trainer.stats import IterationStats
from services.trainer.weight_store import Snapshot

logger = logging.getLogger(__name__)


@dataclass
class Policy:
    """The model in training, its frozen reference (None when the algebra does not need one) and what moves it."""

    model: Any
    reference: Any | None
    optimizer: MasterAdamW
    control: GradientControl

    @classmethod
    def create(cls, model: Any, config: JobConfig) -> "Policy":
        reference = freeze_copy(model) if needs_reference(config.objective) else None
        return cls(model, reference, MasterAdamW(model, config.optimizer), GradientControl(config.gac))

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint needs besides the published weights; no copies."""
        return self.optimizer.state_tensors() | self.control.state_tensors()

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], num_steps: int) -> None:
        """Raises ValueError when they are another model's."""
        self.optimizer.load_state_tensors(tensors, num_steps)
        self.control.load_state_tensors(tensors)


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
        self._feed = GroupFeed(link, state.next_iteration)
        self._device = next(policy.model.parameters()).device

    def run(self) -> TrainState:
        self._link.announce(self._snapshot())
        while self._state.next_iteration < self._config.schedule.num_iterations:
            self.run_iteration(self._state.next_iteration)
        while self._link.check() is JobState.PAUSED:  # paused in its last iteration: the user is to have the last word
            time.sleep(0.5)
        return self._state

    def run_iteration(self, iteration: int) -> None:
        stats = IterationStats(self._state.policy_version)
        self._policy.optimizer.drop_gradients()
        num_groups = self._config.rollout.num_prompts_per_iteration
        micro_batches: Iterable[list[RolloutGroup]] = self._feed.micro_batches(iteration, num_groups, self._cost)
        scale = 1.0
        if needs_whole_iteration(self._config.objective):
            micro_batches = list(micro_batches)
            scale = iteration_scale([group for groups in micro_batches for group in groups])
        for groups in micro_batches:
            self._link.check()
            with stats.busy("train/micro_batches_s"):
                self.accumulate(groups, stats, scale)
        with stats.busy("train/step_s"):
            self.step(stats)
            snapshot = self._snapshot()
        self._link.announce(snapshot)
        is_new = self._link.commit(iteration, snapshot, stats.report())
        log_iteration(iteration, stats.report(), is_new)
        self.checkpoint_if_due()

    def accumulate(self, groups: list[RolloutGroup], stats: IterationStats, scale: float = 1.0) -> None:
        """Add one micro-batch's unnormalised gradient."""
        for group in groups:
            self._verify(group)
            stats.add_group(group)
        informative = [group for group in groups if is_informative(group, self._config)]
        if not informative:
            return
        batch = pack(informative, self._device)
        loss_sum = self.loss(batch, stats, scale).loss_sum
        if not torch.isfinite(loss_sum):
            raise JobFailed(f"the loss is not finite ({loss_sum.item()}) in groups {', '.join(batch.group_ids)}")
        loss_sum.backward()

    def loss(self, batch: MicroBatch, stats: IterationStats, scale: float) -> Loss:
        """Policy and reference on the same packed row; the old policy is the policy: one step per iteration."""
        temperature = self._config.rollout.temperature
        trainer_logprobs, entropy = response_logprobs(self._policy.model, batch, temperature)
        ref_logprobs = None
        if self._policy.reference is not None:
            with torch.no_grad():
                ref_logprobs, _ = response_logprobs(self._policy.reference, batch, temperature)
        logprobs = Logprobs(trainer_logprobs, trainer_logprobs.detach(), ref_logprobs)
        loss = compute_loss(self._config.objective, batch, logprobs, scale)
        stats.add_loss(batch, trainer_logprobs, loss, entropy)
        return loss

    def step(self, stats: IterationStats) -> None:
        """The barrier: exactly one rescale, one clip, one optimizer step."""
        if stats.num_responses == 0:
            raise JobFailed(f"every group of the iteration failed; the first one: {stats.first_failure}")
        num_tokens = stats.num_tokens - stats.num_rejected_tokens
        divisor = loss_denominator(self._config, num_tokens, stats.num_responses, stats.num_pairs)
        optimizer = self._policy.optimizer
        decision = self._policy.control.apply(optimizer.rescale(divisor))
        stats.add_decision(decision)
        stats.values["train/grad_norm"] = optimizer.clip()
        if decision.action is GacAction.SKIP and self._config.gac.mode == "control":
            optimizer.drop_gradients()
        else:
            stats.values["train/learning_rate"] = optimizer.step()
        self._state = replace(
            self._state,
            next_iteration=self._state.next_iteration + 1,
            policy_version=self._state.policy_version + 1,
            num_steps=optimizer.num_steps,
        )

    def checkpoint_if_due(self) -> None:
        done = self._state.next_iteration
        is_last = done == self._config.schedule.num_iterations
        if not is_last and done % self._config.checkpoint.every_iterations:
            return
        tensors = self._policy.state_tensors()
        path = self._checkpoints.save(self._state, self._policy.model, tensors, self._files)
        self._link.checkpointed(self._durable_until, done, str(path))
        self._durable_until = done

    def _snapshot(self) -> Snapshot:
        return self._link.snapshot(self._state.policy_version, self._policy.model.named_parameters())

    def _cost(self, group: RolloutGroup) -> int:
        return num_places(group) if is_informative(group, self._config) else 0

    def _verify(self, group: RolloutGroup) -> None:
        """The second of the two ends: the submission script has checked the same rule."""
        version = self._state.policy_version
        if group.HasField("failure"):
            if self._config.rollout.on_group_failure == "fail":
                raise JobFailed(f"group {group.group_id}: {group.failure.kind}: {group.failure.message}")
        elif span_versions(group) != [version]:
            raise JobFailed(f"group {group.group_id} has tokens of versions {span_versions(group)}, wanted {version}")


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
