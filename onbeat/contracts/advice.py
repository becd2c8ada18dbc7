"""Advice on which side of a job should have more or fewer devices: a prediction from idle shares, not a measurement.

    W_r = n_r (1 - rollout idle) wall        generating, in device-seconds
    W_t = n_t (1 - trainer idle) wall        training
    H   = wall - f(W_r / n_r, W_t / n_t)     the part that overlaps with nothing
    wall(n_r', n_t') = f(W_r / n_r', W_t / n_t') + H

f is the larger of the two, in `sync` their sum. docs/performance.md says what this leaves out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

from onbeat.contracts.records import IterationRecord

NUM_RECENT, MIN_RECENT = 10, 3  # iterations that it is based on; the first one of a job is left out
WORTH = 0.1  # share of the time that one additional device must save
FREE = 0.03  # share of the time that removing devices may cost

Split = tuple[int, int]  # rollouts, and trainer devices


@dataclass(frozen=True)
class Work:
    """The work of one iteration, and the devices that do it. generate_s and train_s are in device-seconds."""

    num_rollouts: int
    num_trainers: int
    generate_s: float
    train_s: float
    fixed_s: float
    is_sync: bool

    def wall_s(self, split: Split) -> float:
        """Return the time of an iteration with so many rollouts and trainer devices."""
        num_rollouts, num_trainers = split
        sides = (self.generate_s / num_rollouts, self.train_s / num_trainers)
        return (sum(sides) if self.is_sync else max(sides)) + self.fixed_s


def advice_for(committed: Sequence[IterationRecord], mode: str | None) -> str | None:
    """Return advice in words; None while there are too few measurements."""
    num_trainers = (committed[-1].num_training_devices if committed else None) or 1
    work = measure_work(committed, num_trainers, mode or "periodic")
    return advise(work) if work is not None else None


def measure_work(committed: Sequence[IterationRecord], num_trainers: int, mode: str) -> Work | None:
    """Measure the newest iterations that had as many devices as the last one; None while there are too few."""
    known = [
        record for record in committed[1:] if record.tpspd and record.wall_s and record.rollout_idle_frac is not None
    ]
    last = num_devices(known[-1]) if known else 0
    recent = list(takewhile(lambda record: num_devices(record) == last, reversed(known[-NUM_RECENT:])))
    if len(recent) < MIN_RECENT or last <= num_trainers:
        return None
    wall_s = median(record.wall_s or 0.0 for record in recent)
    generate_s = (last - num_trainers) * wall_s * (1 - median(record.rollout_idle_frac or 0.0 for record in recent))
    train_s = num_trainers * wall_s * (1 - median(record.trainer_idle_frac or 0.0 for record in recent))
    measured = Work(last - num_trainers, num_trainers, generate_s, train_s, 0.0, mode == "sync")
    fixed_s = max(0.0, wall_s - measured.wall_s((last - num_trainers, num_trainers)))
    return Work(last - num_trainers, num_trainers, generate_s, train_s, fixed_s, mode == "sync")


def num_devices(record: IterationRecord) -> int:
    tokens = (record.prompt_tokens or 0) + (record.response_tokens or 0)
    return round(tokens / ((record.wall_s or 1.0) * (record.tpspd or 1.0)))


def advise(work: Work) -> str:
    """Return advice on worthwhile changes: `with a second machine, to train: about 6.4 s an iteration instead of 10.4`.

    A job with one rollout and one trainer device is taken for one on a single machine, which has no other device.
    """
    now = (work.num_rollouts, work.num_trainers)
    best, is_single = shrunk(work, grown(work, now), now), now == (1, 1)
    if best == now:
        another = "a second machine" if is_single else "another device"
        return f"leave the split as it is: {another} would save less than {WORTH:.0%} of the time"
    change = describe_machines(best) if is_single else describe_change(now, best)
    return f"{change}: about {shown_s(work.wall_s(best))} s an iteration instead of {shown_s(work.wall_s(now))}"


def describe_machines(best: Split) -> str:
    """Return what a job on a single machine would gain from: `with a second machine, to train`."""
    num_rollouts, num_trainers = best[0] - 1, best[1] - 1
    more = "a second machine" if num_rollouts + num_trainers == 1 else f"{num_rollouts + num_trainers} more machines"
    return f"with {more}, to {' and '.join(['generate'] * (num_rollouts > 0) + ['train'] * (num_trainers > 0))}"


def describe_change(now: Split, best: Split) -> str:
    """Return the devices to add and to remove: `with 3 trainer devices more and 1 rollout less`."""
    parts = []
    for before, after, word in zip(now, best, ("rollout", "trainer device"), strict=True):
        if after != before:
            number = abs(after - before)
            parts.append(f"{number} {word}{'s' * (number != 1)} {'more' if after > before else 'less'}")
    return f"with {' and '.join(sorted(parts, key=lambda part: part.endswith('less')))}"


def shown_s(seconds: float) -> str:
    """Return seconds with the digits that a change shows in.

    >>> [shown_s(seconds) for seconds in (26.3, 6.44, 0.0123)]
    ['26', '6.4', '0.012']
    """
    return f"{seconds:.0f}" if seconds >= 15 else f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"


def grown(work: Work, split: Split) -> Split:
    """Return the split with devices added while each saves WORTH; at most twice as many as now."""
    for _ in range(sum(split)):
        rollouts, trainers = split
        better = min((rollouts + 1, trainers), (rollouts, trainers + 1), key=work.wall_s)
        if work.wall_s(better) > (1 - WORTH) * work.wall_s(split):
            break
        split = better
    return split


def shrunk(work: Work, split: Split, now: Split) -> Split:
    """Return the split without devices that save nearly nothing, on sides that have not grown."""
    longest_s = (1 + FREE) * work.wall_s(split)
    for side in (0, 1):
        while split[side] > 1 and split[side] <= now[side]:
            fewer = (split[0] - 1, split[1]) if side == 0 else (split[0], split[1] - 1)
            if work.wall_s(fewer) > longest_s:
                break
            split = fewer
    return split
