"""The path from the stream to micro-batches: whole groups, in completion order, under a token budget, recorded first.

Replicas read one consumer group, so the stream hands each group to a free replica; the ledger decides which one trains
it (`Groups.record_micro_batch`), so that no group is trained twice or forgotten when a delivery dies with its reader.
"""

import time
from collections.abc import Collection, Iterable, Iterator

from onbeat.config import JobConfig
from onbeat.errors import JobFailed
from onbeat.streams.codec import RolloutGroup
from onbeat.types import JobState
from services.trainer.batch import cost
from services.trainer.job.interface import TrainingJob

# After this time without a delivery, accepted groups are read from the ledger: a delivery may be lost with its reply.
LOOK_AGAIN_S = 3.0
BROKER_FIRST_S = 10.0  # after the deadline, so that a live broker fails the job first: it knows more about the reason
ALL_AT_ONCE = 64  # groups per delivery if there is only one replica
# Groups that end in the same step of the engine arrive one after another. In one pass they share the reading of all
# weights and the writing of all gradients, which costs more than this wait.
GATHER_S = 0.05


class GroupFeed:
    """The micro-batches of this replica, one set of groups after the other.

    Micro-batches recorded before a crash are repeated exactly. After those, `periodic` takes the groups that have
    arrived and `sync` waits for all groups first. Either way the partition is recorded before it is trained.
    """

    def __init__(self, job: TrainingJob, config: JobConfig, next_iteration: int, num_replicas: int = 1) -> None:
        self._job, self._config, self._num_replicas = job, config, num_replicas
        self._is_dynamic = config.rollout.max_prompts_per_iteration is not None
        self._known: dict[str, int] = {}  # id of every group that ever arrived here -> its iteration
        self._waiting: dict[str, RolloutGroup] = {}  # by id, in the order of arrival
        self._quiet_since = self._looked_at = time.monotonic()
        self._add(job.groups.accepted(next_iteration))

    def micro_batches(self, iteration: int, wanted: Collection[str]) -> Iterator[list[RolloutGroup]]:
        """Yield lists of groups. All replicas together get exactly the `wanted` groups (ids) of the iteration, and with
        dynamic sampling those that were dispatched to replace others."""
        self._forget_before(iteration)
        wanted = set(wanted) | self._replacing(iteration)
        for group_ids in self._job.groups.recorded_micro_batches(iteration):
            if group_ids[0] in wanted:
                while not (recorded := self._pick(group_ids)):
                    self._wait(iteration, len(group_ids))
                yield self._begin(iteration, recorded)
                self._quiet_since = time.monotonic()
        left = wanted - self._job.groups.taken(iteration)
        while left := left or self._replacing(iteration) - self._job.groups.taken(iteration):
            ready = self._receive_ready(left)
            if not ready or (self._config.schedule.mode == "sync" and not self._is_complete(iteration, ready, left)):
                self._wait(iteration, len(left) - len(ready))
                left |= self._replacing(iteration)
                if self._num_replicas > 1 or self._is_dynamic:  # other replicas take groups, too
                    left -= self._job.groups.taken(iteration)
                continue
            group_ids = [group.group_id for group in self._take_budget(ready)]
            granted = self._job.groups.record_micro_batch(iteration, group_ids)
            left -= set(group_ids)
            taken = {group_id: self._waiting.pop(group_id) for group_id in group_ids}
            if granted:
                yield self._begin(iteration, [taken[group_id] for group_id in granted])
            self._quiet_since = time.monotonic()

    def _replacing(self, iteration: int) -> set[str]:
        """Return the groups that dynamic sampling may have added to. A group that is accepted has been replaced in the
        same move, if at all: so once all groups are taken and none is new, there will be none."""
        return self._job.groups.dispatched(iteration) if self._is_dynamic else set()

    def _begin(self, iteration: int, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        many = "s" * (len(groups) != 1)
        self._job.doing = f"training a micro-batch of {len(groups)} group{many} of iteration {iteration}"
        return groups

    def _add(self, groups: Iterable[RolloutGroup]) -> bool:
        """Add each group once. Returns whether any was new."""
        new = {group.group_id: group for group in groups if group.group_id not in self._known}
        self._known |= {group_id: group.iteration for group_id, group in new.items()}
        self._waiting |= new
        return bool(new)

    def _forget_before(self, iteration: int) -> None:
        self._known = {group_id: of for group_id, of in self._known.items() if of >= iteration}
        self._waiting = {group_id: group for group_id, group in self._waiting.items() if group.iteration >= iteration}
        self._quiet_since = time.monotonic()

    def _pick(self, group_ids: list[str]) -> list[RolloutGroup]:
        """Take those waiting groups, in that order; take none and return [] while one is still missing."""
        if not self._waiting.keys() >= set(group_ids):
            return []
        return [self._waiting.pop(group_id) for group_id in group_ids]

    def _receive_ready(self, left: set[str]) -> list[RolloutGroup]:
        """Return the groups of `left` that have arrived, enough for about one micro-batch. A single replica waits a
        moment for groups close behind; several replicas take one group at a time.
        """
        budget = self._config.training.max_tokens_per_micro_batch
        self._receive(timeout_s=0.001)
        while True:
            ready = [group for group_id, group in self._waiting.items() if group_id in left]
            is_enough = len(ready) == len(left) or sum(cost(group, self._config) for group in ready) >= budget
            moment_s = GATHER_S if ready and self._num_replicas == 1 else 0.001
            if is_enough or not self._receive(moment_s):
                return ready

    def _is_complete(self, iteration: int, ready: list[RolloutGroup], left: set[str]) -> bool:
        """Return whether all groups of the iteration are accepted and, for a single replica, all have arrived here."""
        is_ready = len(ready) == len(left) or self._num_replicas > 1
        return is_ready and self._job.groups.is_drained(iteration)

    def _take_budget(self, ready: list[RolloutGroup]) -> list[RolloutGroup]:
        budget = self._config.training.max_tokens_per_micro_batch
        batch: list[RolloutGroup] = []
        for group in ready:
            budget -= cost(group, self._config)
            if budget < 0 and batch:
                break
            batch.append(group)
        return batch

    def _receive(self, timeout_s: float) -> bool:
        return self._add(self._job.groups.take(ALL_AT_ONCE if self._num_replicas == 1 else 1, timeout_s))

    def _wait(self, iteration: int, num_left: int) -> None:
        """Wait at most a moment for another group. Raises JobFailed after the iteration's deadline."""
        deadline_s = self._config.schedule.iteration_deadline_s
        self._job.doing = f"waiting for groups of iteration {iteration}: {num_left} missing"
        is_new = self._receive(timeout_s=0.5 if self._num_replicas == 1 else 0.02)
        now = time.monotonic()
        if not is_new and now - self._looked_at > LOOK_AGAIN_S:
            self._looked_at = now
            is_new = self._add(self._job.groups.accepted(iteration, self._known))
        state = self._job.check()
        if is_new or state is JobState.PAUSED:
            self._quiet_since = now
        if now - self._quiet_since > deadline_s + BROKER_FIRST_S:
            raise JobFailed(
                f"iteration {iteration}: no group arrived for {deadline_s:.0f} s, {num_left} are missing; "
                "are rollouts running? (`onbeat top`)"
            )
