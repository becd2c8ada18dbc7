"""A group's spans on the timeline: generation, and what comes after it or between."""

import pytest

from onbeat.streams.codec import RolloutGroup, Timings
from onbeat.streams.ledger.rollout_side import MAX_INTERVALS
from onbeat.streams.signal import Signal
from services.broker.views.spans import accepted_group, group_spans


def parts_of(timings: Timings) -> list[tuple[str, float, float]]:
    group = RolloutGroup(group_id="3-0", iteration=3, worker_id="w1", timings=timings)
    spans = group_spans(accepted_group("100000-0", group, Signal()), 0.0)
    assert {(span.lane, span.group_id, span.iteration) for span in spans} == {("w1", "3-0", 3)}
    return [(span.kind, span.start, span.end) for span in spans]


def test_waits_of_episodes_lie_between_their_calls():
    timings = Timings(generate_s=3.0, score_s=7.0)
    for start_s, end_s in ((0.0, 2.0), (6.0, 7.0)):
        timings.in_engine.add(start_s=start_s, end_s=end_s)
    expected = [("generate", 90, 92), ("environment", 92, 96), ("generate", 96, 97), ("environment", 97, 100)]
    assert parts_of(timings) == expected


def test_spans_of_a_group_are_few_and_end_with_its_acceptance():
    timings = Timings(generate_s=50.0, score_s=50.0)
    for start in range(1000):
        timings.in_engine.add(start_s=start, end_s=start + 0.5)
    parts = parts_of(timings)
    assert len(parts) == 2 * MAX_INTERVALS
    assert max(end for _, _, end in parts) == pytest.approx(100.0)


def test_nothing_generates_a_row_of_examples():
    group = RolloutGroup(group_id="3-0", iteration=3, worker_id="trainer-a", is_supervised=True)
    assert group_spans(accepted_group("100000-0", group, Signal()), 0.0) == []
