"""The gradient of one update, added up micro-batch by micro-batch and left unnormalised until the barrier.

    micro-batch of groups -> verify -> leave out those without signal -> rows
    row                   -> pack -> forward (policy, old, reference, teacher) -> loss sum -> backward

Sharded ranks pass rows together, because each pass is a collective: a rank with fewer rows takes part with idle ones.
"""

import json
from dataclasses import astuple, replace

import torch

from onbeat.contracts.errors import JobFailed
from onbeat.streams.codec import RolloutGroup
from services.trainer.batch import (
    MicroBatch,
    Part,
    counted_responses,
    idle_batch,
    is_masked,
    is_trained,
    pack,
    rows,
)
from services.trainer.iteration import OpenIteration
from services.trainer.policy import Policy
from services.trainer.stats import IterationStats, Tally


class GradientSum:
    """The gradient of an update so far, which the policy's optimizer holds (`gradients()`)."""

    def __init__(self, opened: OpenIteration, policy: Policy, stats: IterationStats, scale: float = 1.0) -> None:
        """Drop the gradient of the previous update. `scale` is the factor that the objective gets for the iteration."""
        self.rows: list[list[Part]] = []
        self._opened, self._policy, self._world = opened, policy, policy.world
        self._stats, self._scale = stats, scale
        self._config = opened.config
        self._device = next(policy.model.parameters()).device
        self._witness: RolloutGroup | None = None  # the first group with responses
        self._is_first_pass = opened.num_updates_done == 0  # the next pass is the first of the iteration
        policy.optimizer.drop_gradients()
        stats.tally = Tally()

    def add(self, groups: list[RolloutGroup]) -> None:
        """Add the gradient of a micro-batch. Raises JobFailed for a group that must not be trained."""
        trained = []
        vocab_size = self._policy.model.config.get_text_config().vocab_size
        for group in groups:
            self._opened.verify(group, vocab_size)
            has_passes = is_trained(group, self._config)
            if self._opened.is_supervised:
                self._stats.add_row(group)
            else:
                self._stats.add_group(group, has_passes, counted_responses(group, self._config))
            if has_passes:
                trained.append(group)
            elif group.responses and self._config.objective.has_advantages:
                is_out = [response.has_no_reward or is_masked(response, self._config) for response in group.responses]
                self._stats.advantages[group.group_id] = [None if out else 0.0 for out in is_out]
            if self._witness is None and group.responses:
                self._witness = group
        self._add_rows(rows(trained, self._config))

    def complete(self) -> None:
        """Pass one row with zero gradient if no group of any rank had signal, so that the mismatch is measured."""
        if self._lockstep(len(self.rows)) == 0:
            counted = replace(self._stats.tally)
            with self._stats.busy("train/micro_batches_s"):
                self._add_rows(rows([self._witness] if self._witness else [], self._config)[:1], weight=0.0)
            self._stats.tally = counted  # tokens of this row that a band rejects are no part of the update

    def sum_counts(self) -> None:
        """Sum the counts over all replicas. This waits for the last replica, so it is the beginning of the barrier."""
        self._stats.tally = Tally(*map(int, self._world.sum_scalars(astuple(self._stats.tally))))

    def reduce(self) -> None:
        """Sum over all replicas: the first half of the barrier. Sharded models have summed in their backward passes."""
        if not self._policy.is_sharded:
            self._world.sum_tensors(list(self._policy.optimizer.gradients().values()))

    def groups_to_blame(self) -> str:
        """Return the groups of all replicas whose own gradient is not finite. Each one is passed again alone.

        The gradient is the same on every replica by now, so that all of them ask this.
        """
        if self._policy.is_sharded:
            return "not known of a sharded model; run one replica alone, or set ONBEAT_PARALLELISM=ddp"
        guilty = []
        for part in [part for row in self.rows for part in row]:
            stats = IterationStats(self._opened.current_version)
            GradientSum(self._opened, self._policy, stats)._add_row([part])
            if not all(gradient.isfinite().all() for gradient in self._policy.optimizer.gradients().values()):
                guilty.append(part.group.group_id)
        messages = self._world.all_gather_bytes(json.dumps(guilty).encode())
        everywhere = [group_id for message in messages for group_id in json.loads(message)]
        return ", ".join(everywhere) or "none, only their sum"

    # ---- rows --------------------------------------------------------------------------------------------------------

    def _add_rows(self, packed: list[list[Part]], weight: float = 1.0) -> None:
        num_passes = self._lockstep(len(packed))
        self._stats.add_micro_batch(num_passes)
        # All are allocated before the first pass, so that none lies between activations; and not earlier, because an
        # engine on this machine usually loads the new version until then.
        self._policy.optimizer.gradients()
        for row in packed:
            self.rows.append(row)
            self._add_row(row, weight)
        for _ in range(num_passes - len(packed)):
            self._pass_idle_row()

    def _lockstep(self, count: int) -> int:
        """Return the largest count of all ranks if they pass rows together (sharded), else this rank's own count."""
        return self._world.largest(count) if self._policy.is_sharded else count

    def _add_row(self, row: list[Part], weight: float = 1.0) -> None:
        """Compute all policies on the same packed row, then the objective and its gradient."""
        batch = pack(row, self._device, config=self._config)
        if self._opened.is_supervised:
            behaviour_logprobs = None
            logprobs, entropy = self._policy.logprobs_of_rows(batch)
        else:
            probed = self._probed_logprobs(batch)
            logprobs, entropy = self._policy.logprobs(batch, self._config.rollout.temperature, self._opened.old_version)
            behaviour_logprobs = logprobs.old if self._opened.has_behaviour_logprobs else probed
        loss = self._config.objective.loss(batch, logprobs, self._scale)
        self._stats.add_loss(batch, logprobs.trainer, behaviour_logprobs, loss, entropy)
        if not torch.isfinite(loss.loss_sum):
            loss_sum = loss.loss_sum.item()
            raise JobFailed(f"the loss is not finite ({loss_sum}) in groups {', '.join(batch.group_ids)}")
        (loss.loss_sum * weight).backward()

    def _pass_idle_row(self) -> None:
        """Take part in the collectives of ranks that have one more row, without adding to the gradient."""
        batch = idle_batch(self._device)
        if self._opened.is_supervised:
            (self._policy.logprobs_of_rows(batch)[0].trainer * 0.0).sum().backward()
            return
        self._probed_logprobs(batch)
        logprobs, _ = self._policy.logprobs(batch, 1.0, self._opened.old_version)
        (logprobs.trainer * 0.0).sum().backward()

    def _probed_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        """Return the trainer's logprobs [N] with the weights that generated, if only the comparison with engines needs
        them, else None. It needs all while the engines are probed; later, those of an iteration's first pass."""
        is_needed = self._is_first_pass or self._opened.is_probed
        self._is_first_pass = False  # also if this rank's was an idle one: ranks must stay in lockstep
        version = self._opened.behaviour_version
        if self._opened.has_behaviour_logprobs or not is_needed:
            return None
        assert version is not None, "no pass before the first groups are here"
        return self._policy.logprobs_at(version, batch, self._config.rollout.temperature)
