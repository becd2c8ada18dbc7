"""Arithmetic of time intervals: (start, end) in seconds, on one clock."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union_of(intervals: Iterable[Interval], gap_s: float = 0.0) -> list[Interval]:
    """Return the intervals in order. Those that overlap, or have a gap of at most `gap_s` between them, are one."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start - union[-1][1] <= gap_s:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def common_to(left: Iterable[Interval], right: Iterable[Interval]) -> list[Interval]:
    """Return the times that lie in at least one interval of both sides, in order.

    >>> common_to([(0, 2), (1, 5)], [(4, 9), (1, 3)])
    [(1, 3), (4, 5)]
    """
    ours, theirs = union_of(left), union_of(right)
    common: list[Interval] = []
    here = there = 0
    while here < len(ours) and there < len(theirs):
        start, end = max(ours[here][0], theirs[there][0]), min(ours[here][1], theirs[there][1])
        if start < end:
            common.append((start, end))
        if ours[here][1] < theirs[there][1]:
            here += 1
        else:
            there += 1
    return common


def total_s(intervals: Iterable[Interval]) -> float:
    """Return the seconds in which at least one of the intervals runs.

    >>> total_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    return sum(end - start for start, end in union_of(intervals))


def share_of(part: Sequence[Interval], whole: Sequence[Interval]) -> float | None:
    """Return the share of the time of `whole` in which a part runs, too; None if `whole` has no time.

    >>> share_of([(1.0, 3.0)], [(0.0, 2.0), (6.0, 8.0)])
    0.25
    """
    whole_s = total_s(whole)
    return total_s(common_to(part, whole)) / whole_s if whole_s > 0 else None
