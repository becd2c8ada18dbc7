"""The verdict on a job in one line: how its reward moved, how much was truncated, and the time left."""

import time
from collections.abc import Sequence
from statistics import fmean, median

from onbeat.contracts.records import IterationRecord
from onbeat.contracts.states import IterationState, JobState
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, read_iterations
from services.broker.views.records import job_record

NUM_ENDS = 5  # iterations at either end whose mean is taken; half of them in a young job
NUM_RECENT = 10  # iterations that the time left is computed from
LATE, LATE_S = 3.0, 10.0  # an open iteration that takes longer than so many usual ones, and these seconds, is late


async def read_verdict(ledger: Ledger, fields: Fields) -> str:
    """Return `reward 0.31 to 0.74; 12% truncated; 3 min left` of a job; '' before its first commit.

    Supervised iterations before RL have no reward, and take another time: the verdict begins after them.
    """
    start = job_record(fields).first_after_warm_start
    done, total = int(fields["next_iteration"]), int(fields["num_iterations"])

    async def read(begin: int, limit: int) -> list[IterationRecord]:
        return await read_iterations(ledger, fields["id"], max(start, begin) - 1, limit)

    first, newest = await read(start, NUM_ENDS), await read(done - NUM_RECENT, NUM_RECENT + 1)
    num_left = total - done if fields["state"] == JobState.RUNNING else 0
    open_s = next((time.time() - record.opened_at for record in newest if not is_committed(record)), 0.0)
    first, recent = ([record for record in records if is_committed(record)] for records in (first, newest))
    return describe_course(first, recent, done - start, num_left, open_s)


def is_committed(record: IterationRecord) -> bool:
    return record.state is IterationState.COMMITTED


def describe_course(
    first: Sequence[IterationRecord],
    recent: Sequence[IterationRecord],
    num_committed: int,
    num_left: int,
    open_s: float = 0.0,
) -> str:
    """Return the verdict on committed iterations: the first ones, and the last ones.

    `num_committed`: by this job. `num_left`: iterations whose time is added up; 0: none is told. `open_s`: since the
    next iteration opened; an iteration that takes several times as long as usual has no time left to report.
    """
    count = max(1, min(NUM_ENDS, num_committed // 2))
    before, after = rewards_of(first[:count]), rewards_of(recent[-count:])
    parts = []
    if before and after:
        now = f"{fmean(after):.2f}"
        parts.append(f"reward {fmean(before):.2f} to {now}" if num_committed > 1 else f"reward {now}")
    truncated = [
        share for record in recent[-count:] if (share := record.metrics.get("rollout/truncated_frac")) is not None
    ]
    if truncated:
        parts.append(f"{fmean(truncated):.0%} truncated")
    started = {record.iteration for record in first[:1]}  # this iteration contains the engine's start
    walls = [record.wall_s for record in recent if record.wall_s and record.iteration not in started]
    if num_left and walls and open_s <= LATE * median(walls) + LATE_S:
        parts.append(describe_time_left(num_left * median(walls)))
    return "; ".join(parts)


def rewards_of(records: Sequence[IterationRecord]) -> list[float]:
    return [record.reward_mean for record in records if record.reward_mean is not None]


def describe_time_left(seconds: float) -> str:
    """Return seconds in the unit of their size.

    >>> [describe_time_left(seconds) for seconds in (47.2, 185, 9000)]
    ['47 s left', '3 min left', '2 h 30 min left']
    """
    if seconds < 90:
        return f"{seconds:.0f} s left"
    minutes = round(seconds / 60)
    return f"{minutes} min left" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min left"
