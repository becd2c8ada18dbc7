"""The adviser: its formula backwards and forwards, and what it says."""

import pytest

from onbeat.advice import Work, advise, measure_work
from onbeat.types import IterationRecord, IterationState


def record(number: int, wall_s: float, rollout_idle: float, trainer_idle: float, devices: int) -> IterationRecord:
    tokens = 2000
    return IterationRecord(
        iteration=number,
        state=IterationState.COMMITTED,
        policy_version=number,
        num_groups=8,
        opened_at=0.0,
        wall_s=wall_s,
        prompt_tokens=500,
        response_tokens=tokens - 500,
        rollout_idle_frac=rollout_idle,
        trainer_idle_frac=trainer_idle,
        tpspd=tokens / wall_s / devices,
    )


def test_work_is_what_the_busy_shares_say() -> None:
    """The worked example of docs/performance.md."""
    work = measure_work([record(i, 10.4, 0.66, 0.24, 2) for i in range(6)], num_trainers=1, mode="periodic")
    assert work is not None
    assert (work.generate_s, work.train_s, work.fixed_s) == pytest.approx((3.536, 7.904, 2.496))
    assert work.wall_s((1, 1)) == pytest.approx(10.4)
    assert work.wall_s((1, 2)) == pytest.approx(3.952 + 2.496)
    assert advise(work) == "add 1 trainer device: about 6.4 s an iteration instead of 10.4"


def test_in_sync_both_sides_take_their_turn() -> None:
    work = measure_work([record(i, 10.0, 0.6, 0.5, 2) for i in range(6)], num_trainers=1, mode="sync")
    assert work is not None
    assert (work.generate_s, work.train_s, work.fixed_s) == pytest.approx((4.0, 5.0, 1.0))
    assert work.wall_s((2, 1)) == pytest.approx(2.0 + 5.0 + 1.0)


def test_devices_that_do_nothing_can_go() -> None:
    work = Work(num_rollouts=6, num_trainers=1, generate_s=6.0, train_s=3.0, fixed_s=70.0, is_sync=False)
    assert advise(work) == "remove 4 rollouts: about 73.0 s an iteration instead of 73.0"


def test_what_is_balanced_is_left_alone() -> None:
    work = Work(num_rollouts=2, num_trainers=1, generate_s=20.0, train_s=10.0, fixed_s=1.0, is_sync=False)
    assert advise(work).startswith("leave the split as it is")


def test_it_grows_to_no_more_than_twice_as_many() -> None:
    work = Work(num_rollouts=1, num_trainers=1, generate_s=100.0, train_s=1.0, fixed_s=0.0, is_sync=False)
    assert advise(work).startswith("add 2 rollouts: about 33.3 s")


@pytest.mark.parametrize("num_records", [0, 1, 3])
def test_too_few_iterations_give_no_advice(num_records: int) -> None:
    """The first one has the start of the engine in it."""
    assert measure_work([record(i, 10.0, 0.5, 0.5, 2) for i in range(num_records)], 1, "periodic") is None


def test_only_iterations_with_the_devices_of_now_count() -> None:
    before = [record(i, 99.0, 0.0, 0.9, 2) for i in range(8)]
    now = [record(8 + i, 10.0, 0.5, 0.5, 3) for i in range(3)]
    work = measure_work(before + now, 1, "periodic")
    assert work is not None
    assert (work.num_rollouts, work.generate_s) == (2, pytest.approx(10.0))
    assert measure_work(before + now[:2], 1, "periodic") is None


def test_a_record_without_shares_is_no_measurement() -> None:
    records = [record(i, 10.0, 0.5, 0.5, 2) for i in range(6)]
    for each in records[3:]:
        each.rollout_idle_frac = None
    assert measure_work(records, 1, "periodic") is None
