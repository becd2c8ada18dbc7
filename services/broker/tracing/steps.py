"""The times at which the trainer worked on each group: recorded micro-batches are matched with the reported spans.

A trainer reports the spans of its first rank, in order, without names. The record has the groups of each micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.types import MAX_TRAINER_SPANS, Span


@dataclass(frozen=True)
class TrainedGroup:
    """The training of one group."""

    start: float  # start of its micro-batch, Unix seconds
    end: float
    used_at: float  # end of the optimizer step
    update: int  # number of that step in the iteration
    index: int | None  # number of the micro-batch, in the order of recording; None: not recorded
    rank: int  # rank of the trainer's replica
    is_timed: bool  # False: it was at an unknown time between start and end


@dataclass(frozen=True)
class Update:
    """An optimizer step and the micro-batches before it."""

    micro_batches: list[Span]
    optimizer: Span


@dataclass(frozen=True)
class Batch:
    index: int
    rank: int
    span: Span | None


@dataclass(frozen=True)
class Steps:
    updates: list[Update]  # empty: the trainer reported none, or an unexpected number
    batches: dict[str, Batch]  # by group
    num_updates: int
    num_groups: int
    committed_at: float

    def of(self, group_id: str, accepted_at: float) -> TrainedGroup:
        number = update_of(group_id, self.num_updates, self.num_groups)
        used_at = begun_at = self.committed_at
        if self.updates:
            begun_at, used_at = self.updates[number].optimizer.start, self.updates[number].optimizer.end
        batch = self.batches.get(group_id)
        span = batch.span if batch else None
        return TrainedGroup(
            start=span.start if span else accepted_at,
            end=span.end if span else max(accepted_at, begun_at),
            used_at=used_at,
            update=number,
            index=batch.index if batch else None,
            rank=batch.rank if batch else 0,
            is_timed=span is not None,
        )


def find_steps(
    trained: Sequence[Span],
    recorded: Sequence[tuple[int, list[str]]],
    num_updates: int,
    num_groups: int,
    num_replicas: int,
    committed_at: float,
) -> Steps:
    """Match groups with the trainer's spans.

    recorded: (rank, group ids) of each micro-batch, in order; rank 0 also has those of replicas that are gone.
    """
    updates = split_updates(trained)
    if len(updates) != num_updates:
        updates = []
    batches: dict[str, Batch] = {}
    for number in range(num_updates):
        of_update = [
            (index, rank, ids)
            for index, (rank, ids) in enumerate(recorded)
            if update_of(ids[0], num_updates, num_groups) == number
        ]
        reported = [index for index, rank, _ in of_update if rank % max(1, num_replicas) == 0]
        spans = updates[number].micro_batches if updates and len(trained) < MAX_TRAINER_SPANS else []
        # There may be one more span, the last: the row without gradient of an update without signal.
        is_clear = len(spans) - len(reported) in (0, 1)
        span_of = dict(zip(reported, spans, strict=False)) if is_clear else {}
        batches |= {id_: Batch(index, rank, span_of.get(index)) for index, rank, ids in of_update for id_ in ids}
    return Steps(updates, batches, num_updates, num_groups, committed_at)


def split_updates(trained: Sequence[Span]) -> list[Update]:
    updates, micro_batches = list[Update](), list[Span]()
    for span in sorted(trained, key=lambda span: span.start):
        if span.kind == "micro_batch":
            micro_batches.append(span)
        elif span.kind == "optimizer":
            updates.append(Update(micro_batches, span))
            micro_batches = []
    return updates


def update_of(group_id: str, num_updates: int, num_groups: int) -> int:
    """Return the number of the update that trains a group, by its place in the iteration, as in the trainer.

    >>> [update_of(f"7-{index}", num_updates=2, num_groups=5) for index in range(5)]
    [0, 0, 0, 1, 1]
    """
    return int(group_id.rpartition("-")[2]) * num_updates // num_groups
