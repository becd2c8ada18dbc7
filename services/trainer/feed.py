"""From the stream to micro-batches: whole groups, in completion order, under a token budget, written down first."""

import time
from collections.abc import Callable, Iterator

from onbeat.errors import JobFailed
from onbeat.streams.codec import RolloutGroup
from onbeat.streams.ledger import Delivery
from onbeat.types import JobState
from services.trainer.link import Link

Cost = Callable[[RolloutGroup], int]  # places in the packed row


class GroupFeed:
    """Groups of one iteration as micro-batches, in completion order and under a token budget.

    What was recorded before a crash is repeated exactly; from there on, `periodic` takes whatever has arrived and
    `sync` waits for all groups first. Either way the partition is written down before it is trained.
    """

    def __init__(self, link: Link, next_iteration: int) -> None:
        self._link = link
        self._waiting: list[Delivery] = [d for d in link.pending_groups() if d.group.iteration >= next_iteration]

    def micro_batches(self, iteration: int, num_groups: int, cost: Cost) -> Iterator[list[RolloutGroup]]:
        """Yield lists of RolloutGroup; together exactly the iteration's `num_groups`. `cost(group)` is in tokens."""
        num_left = num_groups
        for group_ids in self._link.recorded_micro_batches(iteration):
            while not (wanted := self._pick(group_ids)):
                self._wait_for_more(iteration, num_left)
            num_left -= len(wanted)
            yield wanted
        while num_left > 0:
            self._receive(timeout_s=0.001)
            is_sync = self._link.config.schedule.mode == "sync"
            while self._num_waiting(iteration) < (num_left if is_sync else 1):
                self._wait_for_more(iteration, num_left)
            batch = self._take_budget(iteration, cost)
            self._link.record_micro_batch(iteration, [group.group_id for group in batch])
            num_left -= len(batch)
            yield batch

    def _pick(self, group_ids: list[str]) -> list[RolloutGroup]:
        found = {d.group.group_id: d for d in self._waiting if d.group.group_id in group_ids}
        if len(found) < len(group_ids):
            return []
        self._waiting = [d for d in self._waiting if d.group.group_id not in found]
        return [found[group_id].group for group_id in group_ids]

    def _num_waiting(self, iteration: int) -> int:
        return sum(d.group.iteration == iteration for d in self._waiting)

    def _take_budget(self, iteration: int, cost: Cost) -> list[RolloutGroup]:
        budget = self._link.config.training.max_tokens_per_micro_batch
        batch: list[Delivery] = []
        for delivery in self._waiting:
            if delivery.group.iteration != iteration:
                continue
            budget -= cost(delivery.group)
            if budget < 0 and batch:
                break
            batch.append(delivery)
        self._waiting = [d for d in self._waiting if d not in batch]
        return [d.group for d in batch]

    def _receive(self, timeout_s: float) -> bool:
        deliveries = self._link.take_groups(timeout_s)
        self._waiting += deliveries
        return bool(deliveries)

    def _wait_for_more(self, iteration: int, num_left: int) -> None:
        """Block until another group arrives. Raises JobFailed when none does for the iteration's deadline."""
        deadline_s = self._link.config.schedule.iteration_deadline_s
        deadline = time.monotonic() + deadline_s
        while not self._receive(timeout_s=0.5):
            if self._link.check() is JobState.PAUSED:
                deadline = time.monotonic() + deadline_s
            if time.monotonic() > deadline:
                raise JobFailed(
                    f"iteration {iteration}: no group arrived for {deadline_s:.0f} s, {num_left} are missing; "
                    "are rollouts running? (`onbeat workers`)"
                )
