"""`objective.signal`: what a submission is refused for, in one sentence."""

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from tests.trainer_fixtures import REWARDED
from tests.world import job_body

SEVERAL = [{"name": "exact", "part": "right"}, {"name": "regex", "options": {"pattern": "x"}, "part": "short"}]
KL_IN_REWARD = {"coef": 0.1, "placement": "reward"}
REFUSED = [
    ({"signal": "parts:right"}, {"reward": SEVERAL}, "'parts:right' is no signal; use reward, solved, or part:NAME"),
    ({"signal": "part:"}, {"reward": SEVERAL}, "'part:' is no signal"),
    (
        {"signal": "part:wrong"},
        {"reward": SEVERAL},
        "no reward is called wrong; use part:NAME with one of right, short",
    ),
    ({"signal": "part:exact"}, {}, "part:exact is a part of several rewards, and the job has none under [[reward]]"),
    (
        {"signal": "part:right"},
        {"reward": None, "environment": {"name": "game"}},
        "part:right is a part of several rewards, and the job has none",
    ),
    ({"signal": "solved"}, {}, "solved compares rewards with solved_at, which is not given; set solved_at"),
    ({"signal": "solved", "kl": KL_IN_REWARD}, {"solved_at": 1.0}, "use kl.placement = 'loss', or signal = 'reward'"),
]


def job(objective, **sections):
    return JobConfig.model_validate(job_body(objective=objective, **sections))


@pytest.mark.parametrize(("objective", "sections", "sentence"), REFUSED)
def test_a_signal_that_cannot_be_is_refused(objective, sections, sentence):
    with pytest.raises(ValidationError) as caught:
        job(objective, **sections)
    (error,) = caught.value.errors()
    assert sentence in error["msg"]
    assert "\n" not in error["msg"]


@pytest.mark.parametrize("kind", sorted(REWARDED))
def test_every_objective_takes_every_signal(kind):
    objective = {"type": kind}
    schedule = {"mode": "sync"}
    assert job(objective, schedule=schedule).objective.signal == "reward"
    for signal, sections in (("solved", {"solved_at": 1.0}), ("part:short", {"reward": SEVERAL})):
        accepted = job(objective | {"signal": signal}, schedule=schedule, **sections)
        assert JobConfig.model_validate_json(accepted.model_dump_json()) == accepted
        assert accepted.objective.signal == signal
