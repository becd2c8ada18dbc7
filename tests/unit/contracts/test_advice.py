"""The adviser: its formula backwards and forwards, and what it says."""

import pytest

from onbeat.contracts.advice import Work, advice_for, advise, measure_work
from onbeat.contracts.records import IterationRecord
from onbeat.contracts.states import IterationState


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
    assert advise(work) == "with a second machine, to train: about 6.4 s an iteration instead of 10.4"


def test_in_sync_both_sides_take_their_turn() -> None:
    work = measure_work([record(i, 10.0, 0.6, 0.5, 2) for i in range(6)], num_trainers=1, mode="sync")
    assert work is not None
    assert (work.generate_s, work.train_s, work.fixed_s) == pytest.approx((4.0, 5.0, 1.0))
    assert work.wall_s((2, 1)) == pytest.approx(2.0 + 5.0 + 1.0)


def test_advice_knows_how_many_devices_train() -> None:
    """Six devices: were only one of them a trainer's, five rollouts would be busy."""
    records = [record(i, 10.0, 0.9, 0.0, 6).model_copy(update={"num_training_devices": 4}) for i in range(6)]
    assert advice_for(records, "periodic") == advise(Work(2, 4, 2.0, 40.0, 0.0, is_sync=False))
    assert advice_for([], "periodic") is None


@pytest.mark.parametrize(
    ("num_rollouts", "generate_s", "train_s", "fixed_s", "advice"),
    [
        (6, 6.0, 3.0, 70.0, "with 4 rollouts less: about 73 s an iteration instead of 73"),  # they do nothing
        (2, 20.0, 10.0, 1.0, "leave the split as it is: another device would save less"),  # it is balanced
        (1, 10.0, 10.0, 50.0, "leave the split as it is: a second machine would save less"),
        (2, 2.0, 20.0, 1.0, "with 3 trainer devices more and 1 rollout less: about 6.0 s"),
        (1, 100.0, 1.0, 0.0, "with 2 more machines, to generate: about 33 s"),  # twice as many at most
    ],
)
def test_advice_changes_what_is_worth_it(num_rollouts, generate_s, train_s, fixed_s, advice):
    assert advise(Work(num_rollouts, 1, generate_s, train_s, fixed_s, is_sync=False)).startswith(advice)


def test_only_full_measurements_with_the_devices_of_now_count() -> None:
    assert measure_work([record(i, 10.0, 0.5, 0.5, 2) for i in range(3)], 1, "periodic") is None  # the first is none
    before = [record(i, 99.0, 0.0, 0.9, 2) for i in range(8)]
    now = [record(8 + i, 10.0, 0.5, 0.5, 3) for i in range(3)]
    work = measure_work(before + now, 1, "periodic")
    assert work is not None
    assert (work.num_rollouts, work.generate_s) == (2, pytest.approx(10.0))
    now[0].rollout_idle_frac = None
    assert measure_work(before + now, 1, "periodic") is None
