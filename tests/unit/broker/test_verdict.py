"""The verdict on a job begins with its reward, and tells the time left while it runs."""

import pytest

from onbeat.contracts.records import IterationRecord
from services.broker.doctor.verdict import describe_course
from tests.unit.broker.test_learning import iteration


def course(num: int) -> list[IterationRecord]:
    """Return iterations of 10 s with rising rewards. The first one, in which the engine starts, takes 60 s."""
    records = [iteration(i, i / 10, **{"rollout/truncated_frac": 0.12}) for i in range(num)]
    for record in records:
        record.wall_s = 10.0 if record.iteration else 60.0
    return records


@pytest.mark.parametrize(
    ("num_committed", "num_left", "verdict"),
    [
        (1, 9, "reward 0.00; 12% truncated"),
        (2, 8, "reward 0.00 to 0.10; 12% truncated; 80 s left"),
        (6, 18, "reward 0.10 to 0.40; 12% truncated; 3 min left"),
        (20, 0, "reward 0.20 to 1.70; 12% truncated"),
    ],
)
def test_verdict_begins_with_learning(num_committed: int, num_left: int, verdict: str) -> None:
    records = course(num_committed)
    assert describe_course(records[:5], records[-10:], num_committed, num_left) == verdict


@pytest.mark.parametrize(("open_s", "end"), [(0.0, "40 s left"), (39.0, "40 s left"), (41.0, "12% truncated")])
def test_late_iteration_leaves_the_time_left_out(open_s: float, end: str) -> None:
    records = course(6)
    assert describe_course(records[:5], records, 6, 4, open_s).endswith(end)


def test_job_without_a_commit_has_no_verdict() -> None:
    assert describe_course([], [], 0, 25) == ""
