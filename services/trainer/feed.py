"""From the stream to micro-batches: whole groups, in completion order, under a token budget, written down first."""

import time
from collections.abc import Callable, Iterable, Iterator

from onbeat.errors import JobFailed
from onbeat.streams.codec import RolloutGroup
from onbeat.types import JobState
from services.trainer.link import Link

Cost = Callable[[RolloutGroup], int]  # places in the packed row

LOOK_AGAIN_S = 3.0  # after so much silence: a delivery may have been lost with its answer, the ledger has not


class GroupFeed:
    """Groups of one iteration after the other as micro-batches.

    What was recorded before a crash is repeated exactly; from there on, `periodic` takes whatever has arrived and
    `sync` waits for all groups first. Either way the partition is written down before it is trained.
    """

    def __init__(self, link: Link, next_iteration: int) -> None:
        self._link = link
        self._known: set[str] = set()  # ids of all groups that ever arrived here
        self._waiting: list[RolloutGroup] = []
        self._add(link.accepted_groups(next_iteration))

    def micro_batches(self, iteration: int, num_groups: int, cost: Cost) -> Iterator[list[RolloutGroup]]:
        """Lists of groups; together exactly the iteration's `num_groups`. `cost(group)` is in tokens."""
        num_left = num_groups
        recorded = self._link.recorded_micro_batches(iteration)
        for group_ids in recorded:
            while not (wanted := self._pick(group_ids)):
                self._wait_for_more(iteration, num_left)
            num_left -= len(wanted)
            yield wanted
        index = len(recorded)
        while num_left > 0:
            self._receive(timeout_s=0.001)
            is_sync = self._link.config.schedule.mode == "sync"
            while self._num_waiting(iteration) < (num_left if is_sync else 1):
                self._wait_for_more(iteration, num_left)
            batch = self._take_budget(iteration, cost)
            self._link.record_micro_batch(iteration, index, [group.group_id for group in batch])
            index += 1
            num_left -= len(batch)
            yield batch

    def _add(self, groups: Iterable[RolloutGroup]) -> bool:
        """Each group once. True if any was new."""
        new = [group for group in groups if group.group_id not in self._known]
        self._known |= {group.group_id for group in new}
        self._waiting += new
        return bool(new)

    def _pick(self, group_ids: list[str]) -> list[RolloutGroup]:
        found = {group.group_id: group for group in self._waiting if group.group_id in group_ids}
        if len(found) < len(group_ids):
            return []
        self._waiting = [group for group in self._waiting if group.group_id not in found]
        return [found[group_id] for group_id in group_ids]

    def _num_waiting(self, iteration: int) -> int:
        return sum(group.iteration == iteration for group in self._waiting)

    def _take_budget(self, iteration: int, cost: Cost) -> list[RolloutGroup]:
        budget = self._link.config.training.max_tokens_per_micro_batch
        batch: list[RolloutGroup] = []
        for group in self._waiting:
            if group.iteration != iteration:
                continue
            budget -= cost(group)
            if budget < 0 and batch:
                break
            batch.append(group)
        taken = {group.group_id for group in batch}
        self._waiting = [group for group in self._waiting if group.group_id not in taken]
        return batch

    def _receive(self, timeout_s: float) -> bool:
        return self._add(self._link.take_groups(timeout_s))

    def _wait_for_more(self, iteration: int, num_left: int) -> None:
        """Block until another group arrives. Raises JobFailed when none does for the iteration's deadline."""
        deadline_s = self._link.config.schedule.iteration_deadline_s
        started = looked_at = time.monotonic()
        while not self._receive(timeout_s=0.5):
            now = time.monotonic()
            if self._link.check() is JobState.PAUSED:
                started = now
            if now - looked_at > LOOK_AGAIN_S:
                looked_at = now
                if self._add(self._link.accepted_groups(iteration)):
                    return
            if now - started > deadline_s:
                raise JobFailed(
                    f"iteration {iteration}: no group arrived for {deadline_s:.0f} s, {num_left} are missing; "
                    "are rollouts running? (`onbeat workers`)"
                )
