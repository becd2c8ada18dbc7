"""The activities of the trainer's main thread, for a timeline. The time between spans is waiting."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from onbeat.contracts.records import MAX_TRAINER_SPANS


@dataclass(frozen=True)
class Span:
    """An activity from `start` to `end`, by time.monotonic()."""

    kind: str  # "micro_batch" | "optimizer" | "publish" | "checkpoint"
    start: float
    end: float


def merged(spans: Sequence[Span], limit: int = MAX_TRAINER_SPANS) -> list[Span]:
    """Merge neighbours of one kind, the smallest gaps first, until at most `limit` spans are left, in order. If that is
    not enough, the oldest are left out.

    0-1, 1.1-2 and 5-6 of one kind, limit 2: 0-2 and 5-6.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    num_excess = max(0, len(ordered) - limit)
    gaps = sorted(
        (after.start - before.end, index)
        for index, (before, after) in enumerate(pairwise(ordered), start=1)
        if before.kind == after.kind
    )
    joined = {index for _, index in gaps[:num_excess]}
    result: list[Span] = []
    for index, span in enumerate(ordered):
        if index in joined:
            result[-1] = replace(result[-1], end=span.end)
        else:
            result.append(span)
    return result[-limit:]


def to_record(spans: Sequence[Span], clock_offset_s: float) -> list[tuple[str, float, float]]:
    """Return (kind, start, seconds) for a commit; `clock_offset_s`: Unix time of Redis minus time.monotonic()."""
    return [(s.kind, round(s.start + clock_offset_s, 4), round(s.end - s.start, 4)) for s in merged(spans)]
