"""The training loop: periodic asynchrony (arXiv 2511.18871).

    for each iteration t (one policy version, a fixed set of groups):
        for each update (all groups, or a share of them by their order):
            for each micro-batch of groups, in completion order, while others are still being generated:
                leave out groups without signal
                pack -> forward (policy, old, reference) -> loss sum -> backward     gradients add up unnormalised
            after the first updates: compare the engines with the trainer
            barrier: reduce over replicas -> rescale once -> GAC -> clip -> AdamW
        snapshot -> publish (version t + 1) -> commit

In `periodic` and `sync` the version is t itself, and the gradient at the barrier is that of the synchronous iteration
up to floating-point order: no step falls inside an update, the groups are fixed at its opening, and the normaliser
is applied once at the end. In `bounded` the version may be older, by max_staleness at most, and is the old policy.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import astuple, replace

import torch

from onbeat.config import JobConfig
from onbeat.errors import JobFailed
from onbeat.objectives.base import Loss
from onbeat.response_stats import ResponseStats
from onbeat.streams.codec import RolloutGroup, check_logprobs, span_versions
from onbeat.types import JobState
from services.trainer.batch import MicroBatch, Part, group_rewards, idle_batch, pack, rows
from services.trainer.checkpoints.store import CheckpointStore, TrainState
from services.trainer.engine_probe import NUM_PROBED, check_mismatch
from services.trainer.gac import GacAction
from services.trainer.job.link import Link, Stopped
from services.trainer.lockstep import create_feed
from services.trainer.policy import Policy, old_version
from services.trainer.publisher import Publisher
from services.trainer.stats import IterationStats, Tally
from services.trainer.world import ALONE, World


class TrainLoop:
    def __init__(
        self,
        link: Link,
        config: JobConfig,
        policy: Policy,
        state: TrainState,
        checkpoints: CheckpointStore,
        files: dict[str, bytes],
        world: World = ALONE,
    ) -> None:
        self._link, self._config, self._policy, self._world = link, config, policy, world
        self._publisher = Publisher(link, config, policy, state, checkpoints, files, world)
        self._feed = create_feed(link, config, state.next_iteration, world, policy.is_sharded)
        self._device = next(policy.model.parameters()).device
        self._iteration = state.next_iteration
        self._current_version = state.policy_version  # version of the weights at the iteration's start
        self._behaviour_version: int | None = None  # the version that generated the iteration, once it is open
        self._num_updates_done = 0  # of the iteration
        self._rows: list[list[Part]] = []  # of the update, to find the one to blame

    def run(self) -> None:
        try:
            self._publisher.start()
            while (state := self._publisher.state).next_iteration < self._config.schedule.num_iterations:
                self.run_iteration(state.next_iteration, state.policy_version)
            self._publisher.finish()
            self._link.wait_for_evaluation()
            while self._link.check() is JobState.PAUSED:  # in its last iteration: the user is to have the last word
                time.sleep(0.5)
        except Stopped:
            if self._is_between_iterations() and self._world.size == 1:  # other ranks may be anywhere
                self._publisher.leave()
            raise

    def _is_between_iterations(self) -> bool:
        """Return whether the weights are those of the last committed iteration, moved by no update of the next."""
        return self._num_updates_done == 0 or self._publisher.state.next_iteration > self._iteration

    def run_iteration(self, iteration: int, current_version: int) -> None:
        stats = IterationStats(current_version, responses=ResponseStats(self._config.solved_at))
        self._iteration, self._current_version = iteration, current_version
        self._behaviour_version, self._num_updates_done = None, 0
        updates: list[Iterable[list[RolloutGroup]]] = [
            self._feed.micro_batches(iteration, group_ids) for group_ids in shares(self._config, iteration)
        ]
        scale = 1.0
        if self._config.objective.needs_whole_iteration:
            updates = [list(micro_batches) for micro_batches in updates]
            scale = self._iteration_scale([group for update in updates for groups in update for group in groups])
        num_responses = sum(self.update(micro_batches, stats, scale) for micro_batches in updates)
        if num_responses == 0:
            raise JobFailed(f"every group of iteration {iteration} failed; {stats.first_failure or 'see the events'}")
        self._publisher.commit(iteration, stats)
        self._check_signal(stats)

    def _check_signal(self, stats: IterationStats) -> None:
        """Raise JobFailed, once a checkpoint is written, after too many iterations in a row without signal. A job that
        is resumed may do as many again."""
        schedule, state = self._config.schedule, self._publisher.state
        limit, is_last = schedule.stop_without_signal, state.next_iteration == schedule.num_iterations
        if limit is None or is_last or state.num_without_signal == 0 or state.num_without_signal % limit:
            return
        self._publisher.leave()
        mean = stats.sums["reward"] / stats.sums["num_responses"]
        raise JobFailed(
            f"stopped after {state.next_iteration} iterations, the last {limit} without signal: in each group all "
            f"responses had equal rewards, {mean:g} on average in the last one (schedule.stop_without_signal). Read "
            f"samples, and correct reward or data in a new job; `onbeat jobs resume` lets this one do {limit} more"
        )

    def update(self, micro_batches: Iterable[list[RolloutGroup]], stats: IterationStats, scale: float) -> int:
        """Take one optimizer step on its share of the iteration; return the number of responses in it."""
        self._policy.optimizer.drop_gradients()
        self._rows.clear()
        stats.start_update()
        witness: list[RolloutGroup] = []
        for groups in micro_batches:
            self._link.check()
            if self._behaviour_version is None:
                self._behaviour_version = self._link.groups.policy_version(self._iteration)
            with stats.busy("train/micro_batches_s"):
                self.accumulate(groups, stats, scale)
            witness = witness or [group for group in groups if group.responses][:1]
        if self._lockstep(len(self._rows)) == 0:  # no signal at all: one row, of zero gradient, shows the mismatch
            with stats.busy("train/micro_batches_s"):
                self._accumulate_rows(rows(witness, self._config)[:1], stats, scale)
        self._probe_engines(stats)
        self._link.doing = f"at the barrier of iteration {self._iteration}: sum over replicas and optimizer step"
        with stats.busy("train/step_s"):
            self.reduce(stats)
            self.step(stats)
        self._num_updates_done += 1
        return stats.tally.num_responses

    def accumulate(self, groups: list[RolloutGroup], stats: IterationStats, scale: float = 1.0) -> None:
        """Add one micro-batch's unnormalised gradient."""
        trained = []
        for group in groups:
            self._verify(group)
            is_trained = self._config.objective.has_signal(group_rewards(group))
            stats.add_group(group, is_trained)
            if is_trained:
                trained.append(group)
            elif group.responses and self._config.objective.has_advantages:
                stats.advantages[group.group_id] = [0.0] * len(group.responses)
        self._accumulate_rows(rows(trained, self._config), stats, scale)

    def _accumulate_rows(self, packed: list[list[Part]], stats: IterationStats, scale: float) -> None:
        num_passes = self._lockstep(len(packed))
        stats.add_micro_batch(num_passes)
        for row in packed:
            self._rows.append(row)
            self.accumulate_row(row, stats, scale)
        for _ in range(num_passes - len(packed)):
            self._pass_idle_row()

    def _lockstep(self, count: int) -> int:
        """Return the largest count of the ranks that pass rows together; a whole replica goes alone."""
        return self._world.largest(count) if self._policy.is_sharded else count

    def accumulate_row(self, row: list[Part], stats: IterationStats, scale: float) -> None:
        batch = pack(row, self._device)
        loss_sum = self.loss(batch, stats, scale).loss_sum
        if not torch.isfinite(loss_sum):
            raise JobFailed(f"the loss is not finite ({loss_sum.item()}) in groups {', '.join(batch.group_ids)}")
        loss_sum.backward()

    def _pass_idle_row(self) -> None:
        """Take part in the collectives of the ranks that have one more row; adds nothing."""
        batch = idle_batch(self._device)
        self._probed_logprobs(batch)
        logprobs, _ = self._policy.logprobs(batch, 1.0, self._old_version())
        (logprobs.trainer * 0.0).sum().backward()

    def loss(self, batch: MicroBatch, stats: IterationStats, scale: float) -> Loss:
        """Compute all policies on the same packed row, then the objective."""
        probed = self._probed_logprobs(batch)
        logprobs, entropy = self._policy.logprobs(batch, self._config.rollout.temperature, self._old_version())
        loss = self._config.objective.loss(batch, logprobs, scale)
        behaviour_logprobs = logprobs.old if self._has_behaviour_logprobs() else probed
        stats.add_loss(batch, logprobs.trainer, behaviour_logprobs, loss, entropy)
        return loss

    def _has_behaviour_logprobs(self) -> bool:
        """Return whether the pass for the loss has them: it includes the policy that generated."""
        is_on_policy = self._behaviour_version == self._current_version and self._num_updates_done == 0
        return is_on_policy or self._behaviour_version == self._old_version()

    def reduce(self, stats: IterationStats) -> None:
        """Sum over all replicas: the first half of the barrier. A sharded model has summed its gradients on the way."""
        if not self._policy.is_sharded:
            self._world.sum_tensors(list(self._policy.optimizer.gradients().values()))
        stats.tally = Tally(*map(int, self._world.sum_scalars(astuple(stats.tally))))

    def step(self, stats: IterationStats) -> None:
        """Do exactly one rescale, one clip and one optimizer step: the second half of the barrier."""
        tally = stats.tally
        if tally.num_responses == 0:  # all of its groups failed: nothing to learn from, and no step
            return
        num_tokens, longest = tally.num_tokens - tally.num_rejected_tokens, self._config.longest_response
        divisor = self._config.objective.denominator(num_tokens, tally.num_responses, tally.num_pairs, longest)
        optimizer = self._policy.optimizer
        self._publisher.wait_for_reader()
        decision = self._policy.control.apply(optimizer.rescale(max(1, divisor)))
        stats.add_decision(decision)
        stats.values["train/grad_norm"] = self._clip()
        if decision.action is GacAction.SKIP and self._config.gac.mode == "control":
            optimizer.drop_gradients()
        else:
            is_last = self._num_updates_done == self._config.training.num_updates_per_iteration - 1
            stats.values["train/learning_rate"] = optimizer.step(*self._publisher.begin() if is_last else ())

    def _clip(self) -> float:
        """Clip the gradient. Raises JobFailed, naming groups, when it is not finite: it never reaches the weights."""
        try:
            return self._policy.optimizer.clip()
        except JobFailed as error:
            raise JobFailed(f"{error}; not finite by themselves: groups {self._groups_to_blame()}") from error

    def _groups_to_blame(self) -> str:
        """Return the groups of this replica whose own gradient is not finite, each tried again by itself."""
        if self._policy.is_sharded:
            return "that only one replica can tell apart; run it alone, or with ONBEAT_PARALLELISM=ddp"
        guilty = []
        for part in [part for row in self._rows for part in row]:
            self._policy.optimizer.drop_gradients()
            self.accumulate_row([part], IterationStats(self._current_version), 1.0)
            if not all(gradient.isfinite().all() for gradient in self._policy.optimizer.gradients().values()):
                guilty.append(part.group.group_id)
        return ", ".join(guilty) or "of another replica, or in their sum alone"

    def _old_version(self) -> int | None:
        assert self._behaviour_version is not None, "no pass before the first groups are here"
        return old_version(self._config, self._behaviour_version, self._current_version, self._num_updates_done)

    def _iteration_scale(self, groups: list[RolloutGroup]) -> float:
        """Return the objective's scale, from all groups of the iteration on all replicas; 1 when every group failed."""
        own = json.dumps([[response.reward for response in group.responses] for group in groups if group.responses])
        messages = self._world.all_gather_bytes(own.encode())
        everywhere = [torch.tensor(rewards) for message in messages for rewards in json.loads(message)]
        return self._config.objective.iteration_scale(everywhere) if everywhere else 1.0

    # ---- do the engines follow ---------------------------------------------------------------------------------------

    def _is_probed(self) -> bool:
        """Return whether this update compares the engines with the trainer; the same on every rank."""
        age = self._iteration - self._config.first_iteration
        return self._num_updates_done == 0 and age <= NUM_PROBED + self._config.max_staleness

    def _probed_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        """Return the trainer's logprobs [N] at the weights that generated, where only the comparison needs them."""
        if self._has_behaviour_logprobs() or not self._is_probed():
            return None
        assert self._behaviour_version is not None, "no pass before the first groups are here"
        return self._policy.logprobs_at(self._behaviour_version, batch, self._config.rollout.temperature)

    def _probe_engines(self, stats: IterationStats) -> None:
        """Raise JobFailed, before the optimizer steps, if their mismatch has grown since iteration 0."""
        if not self._is_probed():
            return
        sums = [stats.sums.get(name, 0.0) for name in ("token/mismatch", "train/trained_tokens")]
        gap, num_tokens = self._world.sum_scalars(sums)
        state = self._publisher.state
        if num_tokens == 0:  # all of its groups failed
            return
        if self._iteration == self._config.first_iteration:
            self._publisher.state = replace(state, first_mismatch=gap / num_tokens)
        elif state.first_mismatch is not None:
            check_mismatch(gap / num_tokens, state.first_mismatch, self._config.model.dtype, self._iteration)

    # ---- what may enter ----------------------------------------------------------------------------------------------

    def _verify(self, group: RolloutGroup) -> None:
        """Check the group again at this end: the submission script has checked the same rule."""
        if group.HasField("failure"):
            if self._config.rollout.on_group_failure == "fail":
                raise JobFailed(f"group {group.group_id}: {group.failure.kind}: {group.failure.message}")
            return
        newest = self._current_version
        wanted, versions = self._behaviour_version, span_versions(group)
        assert wanted is not None, "an iteration with groups is open"
        if versions != [wanted] or not newest - self._config.max_staleness <= wanted <= newest:
            allowed = f"one version, {newest - self._config.max_staleness} to {newest}"
            raise JobFailed(f"group {group.group_id} has tokens of versions {versions}, wanted {wanted} ({allowed})")
        try:
            check_logprobs(group)
        except ValueError as error:
            raise JobFailed(f"{error}; worker {group.worker_id} sent it, stop that one") from error
        largest = largest_token_id(group)
        if largest >= (vocab_size := self._policy.model.config.get_text_config().vocab_size):
            raise JobFailed(
                f"group {group.group_id} has token id {largest}, the model has {vocab_size} tokens; "
                f"worker {group.worker_id} sent it, stop that one"
            )


def largest_token_id(group: RolloutGroup) -> int:
    """Return the largest id of all tokens: of the prompt, sampled, and observed by an episode."""
    sampled = [response.token_ids for response in group.responses]
    observed = [turn.observed_token_ids for response in group.responses for turn in response.turns]
    return max(max(ids) for ids in (group.prompt_token_ids, *sampled, *observed) if ids)


def shares(config: JobConfig, iteration: int) -> list[list[str]]:
    """Return the groups of each update, by their order in the iteration and not by their arrival.

    5 prompts and 2 updates: [[t-0, t-1, t-2], [t-3, t-4]].
    """
    num_prompts, num_updates = config.rollout.num_prompts_per_iteration, config.training.num_updates_per_iteration
    updates: list[list[str]] = [[] for _ in range(num_updates)]
    for index in range(num_prompts):
        updates[index * num_updates // num_prompts].append(f"{iteration}-{index}")
    return updates
