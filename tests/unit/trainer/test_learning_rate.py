"""The learning rate of each step: warm-up, then decay over the rest of the job."""

import pytest

from onbeat.config import OptimizerConfig
from services.trainer.gac import GacAction, GacDecision, GradientControl
from services.trainer.model.optimizer import scheduled_learning_rate
from tests.trainer_fixtures import job_config, recorded_iterations, train


def rates(num_steps, **options):
    config = OptimizerConfig(learning_rate=0.5, **options)
    steps = range(1, num_steps + 1)
    return [scheduled_learning_rate(config, step, num_steps, config.num_warmup_iterations) for step in steps]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"num_warmup_iterations": 1}, [1 / 2, 1, 1, 1, 1]),
        ({"decay": "linear"}, [1, 4 / 5, 3 / 5, 2 / 5, 1 / 5]),
        ({"decay": "linear", "num_warmup_iterations": 1}, [1 / 2, 1, 3 / 4, 2 / 4, 1 / 4]),
        ({"decay": "cosine", "num_warmup_iterations": 1}, [1 / 2, 1, 0.853553, 0.5, 0.146447]),
        ({"decay": "linear", "num_warmup_iterations": 9}, [1 / 10, 2 / 10, 3 / 10, 4 / 10, 5 / 10]),
    ],
)
def test_warm_up_comes_before_the_decay(options, expected):
    assert rates(5, **options) == pytest.approx([0.5 * share for share in expected], abs=1e-6)


def test_warm_up_counts_iterations_and_not_their_updates(tmp_path):
    config = job_config(
        optimizer={"learning_rate": 0.03, "num_warmup_iterations": 1},
        training={"num_updates_per_iteration": 2},
        schedule={"num_iterations": 2},
    )
    _, job = train(config, recorded_iterations(2), tmp_path)
    rates_of_last_steps = [metrics["train/learning_rate"] for metrics in job.reports]
    assert rates_of_last_steps == pytest.approx([0.02, 0.03])  # after steps 2 and 4; the warm-up has 2


LINEAR = {"learning_rate": 0.01, "decay": "linear"}


def test_skipped_steps_have_their_place_in_the_schedule(tmp_path, monkeypatch):
    decisions = iter([GacAction.KEEP, GacAction.SKIP, GacAction.SKIP, GacAction.KEEP])
    monkeypatch.setattr(GradientControl, "apply", lambda self, gradients: GacDecision(next(decisions), None))
    config = job_config(optimizer=LINEAR, gac={"mode": "control"}, schedule={"num_iterations": 4})
    _, job = train(config, recorded_iterations(4), tmp_path)
    rates = [metrics.get("train/learning_rate") for metrics in job.reports]
    assert rates == pytest.approx([0.01, None, None, 0.01 / 4])


@pytest.mark.parametrize(("num_before", "num_updates"), [(1, 1), (2, 1), (1, 2)])
def test_fork_with_other_updates_follows_its_own_schedule(num_before, num_updates, tmp_path):
    groups = recorded_iterations(4)
    before = job_config(training={"num_updates_per_iteration": num_before}, schedule={"num_iterations": 2})
    train(before, groups[:8], tmp_path / "jobs" / "job")
    config = job_config(
        fork={"job": "job", "iteration": 2},
        optimizer=LINEAR,
        training={"num_updates_per_iteration": num_updates},
        schedule={"num_iterations": 4},
    )
    job = train(config, groups[8:], tmp_path).job
    shares = {1: [2 / 4, 1 / 4], 2: [3 / 8, 1 / 8]}  # shares of the last step of iterations 2 and 3
    rates = [metrics["train/learning_rate"] for metrics in job.reports]
    assert rates == pytest.approx([0.01 * share for share in shares[num_updates]])


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, 1.0)])
def test_rates_of_moments_that_adamw_refuses_are_refused(betas):
    with pytest.raises(ValueError, match="betas"):
        job_config(optimizer={"betas": betas})
