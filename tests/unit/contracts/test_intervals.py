"""Arithmetic of intervals against a count of moments."""

import random

from onbeat.contracts.intervals import Interval, common_to, share_of, total_s


def test_common_time_equals_a_count_of_moments() -> None:
    dice = random.Random(3)
    generating: list[Interval] = [(start, start + dice.randrange(1, 30)) for start in dice.sample(range(900), 60)]
    training: list[Interval] = [(start, start + 7) for start in range(0, 900, 20)]

    def runs(intervals: list[Interval], moment: float) -> bool:
        return any(start <= moment < end for start, end in intervals)

    moments = [time + 0.5 for time in range(1000)]
    both = [moment for moment in moments if runs(generating, moment) and runs(training, moment)]
    one = [moment for moment in moments if runs(generating, moment)]
    assert 0 < len(both) < len(one)
    assert total_s(common_to(generating, training)) == len(both)
    assert share_of(training, generating) == len(both) / len(one)


def test_nothing_has_no_share() -> None:
    assert share_of([(0.0, 1.0)], []) is None
    assert share_of([(0.0, 1.0)], [(2.0, 2.0)]) is None
    assert share_of([], [(2.0, 3.0)]) == 0.0
