"""The training loop: periodic asynchrony (arXiv 2511.18871).

    for each iteration t (one policy version; a fixed set of groups, or with dynamic sampling fixed by their rewards):
        for each update (all groups, or a share of them by their order):
            for each micro-batch of groups, in completion order, while others are still being generated:
                leave out groups without signal
                pack -> forward (policy, old, reference, teacher) -> loss sum -> backward  gradients add up unnormalised
            after the first updates: compare the engines with the trainer
            barrier: reduce over replicas -> rescale once -> GAC -> clip -> AdamW, one bucket of parameters at a time;
                after the last update each bucket goes into version t + 1 while the next one is stepped
        finish version t + 1 -> publish -> commit

In `periodic` and `sync` the version is t itself, and the gradient at the barrier is that of the synchronous iteration
up to floating-point order: no step falls inside an update, the groups are fixed at its opening, and the normaliser
is applied once at the end. In `bounded` the groups may come from a version up to max_staleness older, which is then the
old policy of the importance ratio (objective.old_policy = "behaviour").
"""

import json
import time
from collections.abc import Iterable
from dataclasses import replace

import torch

from onbeat.config import JobConfig
from onbeat.contracts.errors import JobFailed
from onbeat.contracts.response_stats import ResponseStats
from onbeat.contracts.states import JobState
from onbeat.objectives.base.opinions import has_reward
from onbeat.streams.codec import RolloutGroup
from onbeat.streams.signal import Signal
from services.trainer.accumulate import GradientSum
from services.trainer.batch import compared, does_count
from services.trainer.checkpoints.store import CheckpointStore, TrainState
from services.trainer.feed import create_feed
from services.trainer.gac import GacAction, GacDecision
from services.trainer.iteration import OpenIteration
from services.trainer.job.interface import Stopped, TrainingJob
from services.trainer.job.row_tokens import choose_row_tokens
from services.trainer.passes.warm_up import warm_up
from services.trainer.policy import Policy
from services.trainer.publisher import Publisher
from services.trainer.stats import IterationStats, check_signal
from services.trainer.warm_start import WarmStart

COMPILING_DEVICES = ("cuda",)
KEEP_ALL = GacDecision(GacAction.NONE, None)  # consecutive gradients of examples may be aligned


class TrainLoop:
    def __init__(
        self, job: TrainingJob, config: JobConfig, policy: Policy, state: TrainState, checkpoints: CheckpointStore
    ) -> None:
        self._job, self._config, self._policy, self._world = job, config, policy, policy.world
        self._publisher = Publisher(job, config, policy, state, checkpoints)
        self._feed = create_feed(job, config, policy.world, policy.is_sharded)
        self._warm_start = WarmStart(job, config, policy, self._publisher.leave)
        self._opened = OpenIteration(config.at(state.next_iteration), state.next_iteration, state.policy_version)

    def run(self) -> None:
        self._warm_up()
        try:
            self._publisher.start()
            while (state := self._publisher.state).next_iteration < self._config.schedule.num_iterations:
                self._warm_start.before(state)
                self._choose_row_tokens(state.next_iteration)
                self.run_iteration(state.next_iteration, state.policy_version)
            self._publisher.finish()
            self._job.wait_for_evaluation(self._config.schedule.num_iterations)
            while self._job.check() is JobState.PAUSED:  # paused in its last iteration: wait until it is resumed
                time.sleep(0.5)
            self._world.all_gather_bytes(b"")  # the other ranks lose the job once rank 0 has ended it
        except Stopped:
            if self._is_between_iterations() and self._world.size == 1:  # other ranks may be in the middle of a pass
                self._publisher.leave()
            raise

    def _warm_up(self) -> None:
        """Compile the kernels of packed attention, on devices where these are compiled."""
        model, device = self._policy.model, self._world.device
        if device.type not in COMPILING_DEVICES or not model.passes.is_packed:
            return
        self._job.status.compile_kernels()
        for _ in warm_up(model, device):
            self._job.check()
        self._policy.optimizer.drop_gradients()

    def _choose_row_tokens(self, iteration: int) -> None:
        """Choose the tokens of a row, once, if the job leaves them to its trainer: when the engines that generate its
        first groups have taken their memory, and before the first micro-batch, which follows from the number."""
        if self._config.training.max_tokens_per_micro_batch != "auto":
            return
        prompt_tokens = None if self._config.is_supervised(iteration) else self._feed.longest_prompt(iteration)
        self._config = choose_row_tokens(self._job, self._config, self._policy, prompt_tokens)
        self._feed.use(self._config)
        self._warm_start = WarmStart(self._job, self._config, self._policy, self._publisher.leave)

    def _is_between_iterations(self) -> bool:
        """Return whether the weights are those of the last committed iteration, unchanged by updates of the next."""
        return self._opened.num_updates_done == 0 or self._publisher.state.next_iteration > self._opened.index

    def run_iteration(self, iteration: int, current_version: int) -> None:
        config = self._config.at(iteration)
        by_source = config.rewards_by_source.values()
        summed = {reward.part for rewards in by_source for reward in rewards if reward.part is not None}
        responses = ResponseStats(
            solved_at=config.solved_at,
            by_source=config.solved_at_by_source,
            summed_parts=sorted(summed),
        )
        stats = IterationStats(current_version, responses=responses, signal=Signal.of(config))
        stats.is_supervised = config.is_supervised(iteration)
        self._opened = OpenIteration(config, iteration, current_version)
        if stats.is_supervised and self._world.is_main:
            self._job.record_rows(iteration)
        updates: list[Iterable[list[RolloutGroup]]] = [
            self._feed.micro_batches(iteration, group_ids) for group_ids in shares(config, iteration)
        ]
        scale = 1.0
        if config.objective.waits_for_iteration:
            updates = [list(micro_batches) for micro_batches in updates]
            arrived = [group for update in updates for groups in update for group in groups]
            scale = self._iteration_scale([group for group in arrived if does_count(group, self._config)])
        num_arrived = sum(self.update(micro_batches, stats, scale) for micro_batches in updates)
        if num_arrived == 0:
            reason = stats.first_failure or "see the events"
            if stats.is_supervised:
                raise JobFailed(
                    f"every row of iteration {iteration} is longer than the context; shorten such rows, or take them "
                    f"out of the file of warm_start.data ({reason})"
                )
            raise JobFailed(f"every group of iteration {iteration} failed; {reason}")
        self._warm_start.measure(stats, iteration)
        snapshot = self._publisher.finish_version(iteration, stats)
        is_published = self._publisher.publish(snapshot, stats)
        self._publisher.commit(snapshot, stats, is_published)
        check_signal(stats, self._config.schedule, self._publisher.state, self._publisher.leave)

    def update(self, micro_batches: Iterable[list[RolloutGroup]], stats: IterationStats, scale: float) -> int:
        """Take one optimizer step on a share of the iteration; return how many responses arrived, on all replicas."""
        opened = self._opened
        gradient = GradientSum(opened, self._policy, stats, scale)
        for groups in micro_batches:
            self._job.check()
            if opened.behaviour_version is None:
                opened.behaviour_version = self._job.groups.policy_version(opened.index)
            with stats.busy("train/micro_batches_s"):
                gradient.add(groups)
        gradient.complete()
        self._probe_engines(stats)
        self._job.status.enter_barrier(opened.index)
        gradient.sum_counts()
        with stats.busy("train/step_s"):
            gradient.reduce()
            self.step(gradient, stats)
        opened.num_updates_done += 1
        return stats.tally.num_arrived

    def step(self, gradient: GradientSum, stats: IterationStats) -> None:
        """Do exactly one rescale, one clip and one optimizer step: the second half of the barrier."""
        tally = stats.tally
        if tally.num_arrived == 0:  # all groups of the update failed
            return
        config = self._opened.config
        num_tokens, longest = tally.num_tokens - tally.num_rejected_tokens, config.longest_response
        divisor = config.objective.denominator(num_tokens, tally.num_responses, tally.num_pairs, longest)
        optimizer = self._policy.optimizer
        self._publisher.wait_for_reader()
        optimizer.rescale(max(1, divisor))
        control = self._policy.control
        decision = control.apply(optimizer.gradients()) if control.is_on and not stats.is_supervised else KEEP_ALL
        stats.add_decision(decision)
        stats.values["train/grad_norm"] = self._clip(gradient)
        if decision.action is GacAction.SKIP:
            optimizer.drop_gradients()
            return
        if self._opened.num_updates_done == config.training.num_updates_per_iteration - 1:
            self._publisher.begin_version()
        fixed = config.warm_start.learning_rate if stats.is_supervised and config.warm_start is not None else None
        stats.values["train/learning_rate"] = optimizer.begin_step(self._opened.place_of_step, fixed)
        for bucket in optimizer.buckets:
            self._publisher.keep(bucket.names)
            optimizer.step_bucket(bucket)
            self._publisher.put(bucket.names)

    def _clip(self, gradient: GradientSum) -> float:
        """Clip the gradient. Raises JobFailed, naming groups, if it is not finite, before it reaches the weights."""
        try:
            return self._policy.optimizer.clip()
        except JobFailed as error:
            guilty = gradient.groups_to_blame()
            raise JobFailed(f"{error}; groups whose own gradient is not finite: {guilty}") from error

    def _iteration_scale(self, groups: list[RolloutGroup]) -> float:
        """Return the objective's scale, from all groups of the iteration on all replicas; 1 when every group failed."""
        values = [compared(group, self._config) for group in groups]
        local_rewards = json.dumps([rewards.tolist() for group in values if len(rewards := group[has_reward(group)])])
        messages = self._world.all_gather_bytes(local_rewards.encode())
        everywhere = [torch.tensor(rewards) for message in messages for rewards in json.loads(message)]
        return self._config.objective.iteration_scale(everywhere) if everywhere else 1.0

    def _probe_engines(self, stats: IterationStats) -> None:
        """Raise JobFailed, before the optimizer step, if the engines' mismatch has grown since the first iteration."""
        if not self._opened.is_probed:
            return
        sums = [stats.sums.get(name, 0.0) for name in ("token/mismatch", "compared_tokens")]
        gap, num_tokens = self._world.sum_scalars(sums)
        state = self._publisher.state
        if num_tokens == 0:  # all groups of the update failed
            return
        if self._opened.index == self._config.first_generated:
            self._publisher.state = replace(state, first_mismatch=gap / num_tokens)
        elif state.first_mismatch is not None:
            self._opened.check_mismatch(gap / num_tokens, state.first_mismatch)


def shares(config: JobConfig, iteration: int) -> list[list[str]]:
    """Return the groups of each update, by their order in the iteration and not by their arrival.

    5 prompts and 2 updates: [[t-0, t-1, t-2], [t-3, t-4]].
    """
    num_prompts, num_updates = config.rollout.num_prompts_per_iteration, config.training.num_updates_per_iteration
    updates: list[list[str]] = [[] for _ in range(num_updates)]
    for index in range(num_prompts):
        updates[index * num_updates // num_prompts].append(f"{iteration}-{index}")
    return updates
