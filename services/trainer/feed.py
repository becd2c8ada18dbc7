"""The path from the stream to micro-batches: whole groups, in completion order, under a token budget, recorded first.

Replicas read one consumer group, so the stream hands each group to a free replica; the ledger decides which one trains
it (`Groups.record_micro_batch`), so that no group is trained twice or forgotten when a delivery dies with its reader.
Every forward and backward of a sharded model is a collective, so there rank 0 takes the groups and deals them out.
"""

import time
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate

from onbeat.config import JobConfig
from onbeat.contracts.errors import JobFailed
from onbeat.contracts.states import JobState
from onbeat.streams.codec import RolloutGroup, decode_group
from services.trainer.batch import cost
from services.trainer.job.interface import TrainingJob
from services.trainer.model.sharding import deal
from services.trainer.world import World

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

    def __init__(self, job: TrainingJob, config: JobConfig, num_replicas: int = 1, num_shares: int = 1) -> None:
        """Create the feed. `num_shares`: ranks among which each micro-batch is dealt out."""
        self._job, self._config, self._num_replicas, self._num_shares = job, config, num_replicas, num_shares
        self._now = config  # the job as the iteration at hand is trained
        self._known: dict[str, int] = {}  # id of every group that ever arrived here -> its iteration
        self._waiting: dict[str, RolloutGroup] = {}  # groups by id, in the order of arrival
        self._quiet_since = self._looked_at = time.monotonic()
        self._num_opened = job.groups.num_opened()  # deliveries of these iterations may be with a predecessor

    def use(self, config: JobConfig) -> None:
        """Go on with the job whose tokens of a row are chosen."""
        self._config = config

    def longest_prompt(self, iteration: int) -> int:
        """Wait until a group of the iteration is accepted; return the tokens of the longest prompt so far."""
        self._quiet_since = time.monotonic()
        while not (groups := self._job.groups.accepted(iteration)):
            self._wait(iteration, self._config.rollout.num_prompts_per_iteration)
        return max(max(len(group.prompt_token_ids), len(group.teacher_prompt_token_ids)) for group in groups)

    def micro_batches(self, iteration: int, wanted: Collection[str]) -> Iterator[list[RolloutGroup]]:
        """Yield lists of groups. All replicas together get exactly the `wanted` groups (ids) of the iteration, and with
        dynamic sampling those that were dispatched to replace others."""
        self._now = self._config.at(iteration)
        self._known = {group_id: number for group_id, number in self._known.items() if number >= iteration}
        self._waiting = {group_id: group for group_id, group in self._waiting.items() if group.iteration >= iteration}
        self._quiet_since = time.monotonic()
        if iteration < self._num_opened:
            self._add(self._job.groups.accepted(iteration, self._known))
        wanted = set(wanted) | self._replacing(iteration)
        for group_ids in self._job.groups.recorded_micro_batches(iteration):
            if group_ids[0] in wanted:
                while not self._waiting.keys() >= set(group_ids):
                    self._wait(iteration, len(group_ids))
                yield self._begin(iteration, group_ids)
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
            group_ids = self._fill_budget(ready)
            granted = self._job.groups.record_micro_batch(iteration, group_ids)
            left -= set(group_ids)
            for group_id in set(group_ids) - set(granted):  # another replica has it
                del self._waiting[group_id]
            if granted:
                yield self._begin(iteration, granted)
            self._quiet_since = time.monotonic()

    @property
    def _budget(self) -> int:
        """The most tokens of a micro-batch of more than one group."""
        return self._config.training.row_tokens * self._num_shares

    @property
    def _is_dynamic(self) -> bool:
        return self._now.rollout.max_prompts_per_iteration is not None

    def _replacing(self, iteration: int) -> set[str]:
        """Return the groups that dynamic sampling may have added to. A group that is accepted has been replaced in the
        same move, if at all: so once all groups are taken and none is new, there will be none."""
        return self._job.groups.dispatched(iteration) if self._is_dynamic else set()

    def _begin(self, iteration: int, group_ids: list[str]) -> list[RolloutGroup]:
        """Take those waiting groups, in that order."""
        self._job.status.train(iteration)
        return [self._waiting.pop(group_id) for group_id in group_ids]

    def _add(self, groups: Iterable[RolloutGroup]) -> bool:
        """Add each group once. Returns whether any was new."""
        new = {group.group_id: group for group in groups if group.group_id not in self._known}
        self._known |= {group_id: group.iteration for group_id, group in new.items()}
        self._waiting |= new
        return bool(new)

    def _receive_ready(self, left: set[str]) -> list[RolloutGroup]:
        """Return the groups of `left` that have arrived, enough for about one micro-batch. A single replica waits a
        moment for groups close behind; several replicas take one group at a time.
        """
        budget = self._budget
        self._receive(timeout_s=0.001)
        while True:
            ready = [group for group_id, group in self._waiting.items() if group_id in left]
            costs = accumulate(cost(group, self._now) for group in ready)
            is_enough = len(ready) == len(left) or any(total >= budget for total in costs)
            moment_s = GATHER_S if ready and self._num_replicas == 1 else 0.001
            if is_enough or not self._receive(moment_s):
                return ready

    def _is_complete(self, iteration: int, ready: list[RolloutGroup], left: set[str]) -> bool:
        """Return whether all groups of the iteration are accepted and, for a single replica, all have arrived here."""
        is_ready = len(ready) == len(left) or self._num_replicas > 1
        return is_ready and self._job.groups.is_drained(iteration)

    def _fill_budget(self, ready: list[RolloutGroup]) -> list[str]:
        """Return the ids of the first groups that fit the token budget; of one at least."""
        budget = self._budget
        batch: list[str] = []
        for group in ready:
            budget -= cost(group, self._now)
            if budget < 0 and batch:
                break
            batch.append(group.group_id)
        return batch

    def _receive(self, timeout_s: float) -> bool:
        return self._add(self._job.groups.take(ALL_AT_ONCE if self._num_replicas == 1 else 1, timeout_s))

    def _wait(self, iteration: int, num_left: int) -> None:
        """Wait at most a moment for another group. Raises JobFailed after the iteration's deadline."""
        deadline_s = self._config.schedule.iteration_deadline_s
        self._job.status.wait_for_groups(iteration, num_left)
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


class LockstepFeed:
    """A feed for all ranks of a sharded model: they see the same micro-batches in the same order, each with its own
    share, balanced by tokens. A rank with fewer rows than another runs idle passes."""

    def __init__(self, world: World, feed: GroupFeed | None, config: JobConfig) -> None:
        """Create the feed of one rank; only rank 0 has the `feed` that takes groups from the stream."""
        assert (feed is not None) == world.is_main
        self._world, self._feed, self._config = world, feed, config

    def use(self, config: JobConfig) -> None:
        """Go on with the job whose tokens of a row are chosen."""
        self._config = config
        if self._feed is not None:
            self._feed.use(config)

    def longest_prompt(self, iteration: int) -> int:
        """Wait as `GroupFeed.longest_prompt` does, and return the same on all ranks."""
        length = None if self._feed is None else str(self._feed.longest_prompt(iteration)).encode()
        return int(self._world.broadcast_bytes(length))

    def micro_batches(self, iteration: int, wanted: Collection[str]) -> Iterator[list[RolloutGroup]]:
        """Yield this rank's share of each micro-batch; it may be empty."""
        config = self._config.at(iteration)
        if self._feed is not None:
            for groups in self._feed.micro_batches(iteration, wanted):
                for group in groups:
                    self._world.broadcast_bytes(group.SerializeToString())
                self._world.broadcast_bytes(b"")  # the micro-batch is complete
                yield self._share(groups, config)
            self._world.broadcast_bytes(b"")  # an empty one: there are no more
            return
        while groups := list(map(decode_group, iter(lambda: self._world.broadcast_bytes(None), b""))):
            yield self._share(groups, config)

    def _share(self, groups: list[RolloutGroup], config: JobConfig) -> list[RolloutGroup]:
        shares = deal([cost(group, config) for group in groups], self._world.size)
        return [groups[index] for index in shares[self._world.rank]]


def create_feed(job: TrainingJob, config: JobConfig, world: World, is_sharded: bool) -> GroupFeed | LockstepFeed:
    """Create the feed: whole replicas take from the stream at their own pace; sharded ones get theirs from rank 0."""
    if not is_sharded:
        return GroupFeed(job, config, num_replicas=world.size)
    feed = GroupFeed(job, config, num_shares=world.size) if world.is_main else None
    return LockstepFeed(world, feed, config)
