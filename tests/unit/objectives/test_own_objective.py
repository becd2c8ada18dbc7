"""The objective of docs/objectives.md: installed, named in a job, checked, trained with; and what is refused."""

import json
import sys
import tomllib
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from onbeat import objectives
from onbeat.config import JobConfig
from onbeat.config.explain import explain_error
from onbeat.objectives import INSTALLED, ForeignObjective, check_installed
from onbeat.objectives.base import Logprobs
from onbeat.objectives.grpo import GrpoObjective
from services.trainer.batch import pack
from services.trainer.session import run_job
from services.trainer.world import ALONE
from tests.docs.pages import blocks_of
from tests.installed import install
from tests.trainer_fixtures import job_config, make_group, recorded_iterations, train

PAGE = "docs/objectives.md"
MODULE = next(block.text for block in blocks_of(PAGE) if block.title == "lenient.py")
SECTION = next(tomllib.loads(b.text)["objective"] for b in blocks_of(PAGE) if b.text.startswith("[objective]"))
NO_TRAINING = """
from onbeat.objectives.base import PolicyObjective

class Half(PolicyObjective):
    def advantages(self, rewards):
        return rewards

class Louder(Half):
    signal: float = 2.0

    def token_loss(self, inputs):
        return -inputs.advantages, None

def function(rewards):
    return rewards
"""
ENTRIES = """
[onbeat.objectives]
lenient = lenient:Lenient
half = half:Half
louder = half:Louder
function = half:function
gone = not_there:Gone
broken = broken:Broken
grpo = half:Half
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    broken = "raise RuntimeError('no\\ndriver')\n"
    folder = install(tmp_path / "site", "lenient", ENTRIES, lenient=MODULE, half=NO_TRAINING, broken=broken)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    INSTALLED.clear()
    for name in ("lenient", "half"):
        sys.modules.pop(name, None)


@pytest.fixture
def config(site):
    return job_config(objective=SECTION)


def test_loss_of_the_pages_objective_worked_by_hand(config):
    """Centred: -1/2, 1/2, 0; what is negative counts a quarter. The ratio is 1, the KL term 0."""
    batch = pack([make_group("0-0", 4, (3, 1, 4), rewards=[0.0, 1.0, 0.5])], torch.device("cpu"))
    trainer = torch.full((8,), -0.5, requires_grad=True)
    loss = config.objective.loss(batch, Logprobs(trainer, trainer.detach(), trainer.detach()))
    assert loss.loss_sum.item() == pytest.approx(3 * 0.125 - 1 * 0.5)
    (gradient,) = torch.autograd.grad(loss.loss_sum, trainer)
    torch.testing.assert_close(gradient, torch.tensor([0.125] * 3 + [-0.5] + [0.0] * 4))
    assert config.objective.denominator(8, 3, 0, 8) == 8
    assert config.objective.needs_reference


def test_periodic_equals_sync_with_the_pages_objective(site, tmp_path):
    groups = recorded_iterations()
    schedules = {"sync": groups, "periodic": groups[::-1]}
    weights = []
    for mode, arrived in schedules.items():
        schedule = {"mode": mode, "num_iterations": 3}
        budget = {"max_tokens_per_micro_batch": 40}
        config = job_config(objective=SECTION, schedule=schedule, training=budget if mode == "periodic" else {})
        arrived = sorted(arrived, key=lambda group: group.iteration)
        model, _ = train(config, arrived, tmp_path / mode, arrivals=12 if mode == "sync" else 2)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert (weights[0] - weights[1]).abs().mean() < 1e-6


def test_stored_job_has_the_objectives_own_keys(config):
    stored = json.loads(config.model_dump_json())
    assert (stored["objective"]["type"], stored["objective"]["below"]) == ("lenient", 0.25)
    assert JobConfig.model_validate(stored) == JobConfig.of_job({"config": json.dumps(stored)}) == config


def test_groups_without_signal_are_equal_to_a_package(config, tmp_path):
    """The page's objective has a KL term, so they are passed; their advantages are 0."""
    solved = JobConfig.model_validate(config.model_dump() | {"solved_at": 2.0}).model_dump()
    solved["objective"]["signal"] = "solved"
    trained = train(JobConfig.model_validate(solved), recorded_iterations(), tmp_path)
    assert all(set(values) == {0.0} for advantages in trained.job.advantages for values in advantages.values())


def test_recorded_key_signal_of_a_package_can_be_read(config):
    stored = json.loads(config.model_dump_json())
    stored["objective"]["signal"] = 0.5
    assert JobConfig.of_job({"config": json.dumps(stored)}).objective.signal == 0.5


def test_accepted_job_is_read_although_its_keys_have_changed(config):
    stored = json.loads(config.model_dump_json())
    stored["objective"]["floor"] = stored["objective"].pop("below")
    read = JobConfig.of_job({"config": json.dumps(stored)})
    with pytest.raises(ValueError, match="floor"):  # the trainer raises it
        check_installed(read.objective)


def test_term_without_advantage_trains_groups_of_equal_rewards(config, monkeypatch):
    objective, equal = config.objective, torch.ones(3)
    plain = objective.model_copy(update={"kl": objective.kl.model_copy(update={"coef": 0.0})})
    assert not plain.has_signal(equal)
    monkeypatch.setattr(type(plain), "is_zero_without_advantage", False)
    assert plain.has_signal(equal)


def refusal(**sections):
    """Return (field, message) as the broker answers."""
    with pytest.raises(ValidationError) as caught:
        job_config(**sections)
    (error,) = caught.value.errors()
    (explained,) = explain_error(error | {"loc": ("body", *error["loc"])}, sections)
    return explained


@pytest.mark.parametrize(
    ("objective", "field", "message"),
    [
        (
            {"type": "leniemt"},
            "objective.type",
            "'leniemt' is installed here; did you mean lenient? There are: broken, ",
        ),
        ({"type": "gone"}, "objective.type", "cannot be imported here: ModuleNotFoundError: No module named 'not_"),
        ({"type": "broken"}, "objective.type", "(broken:Broken) cannot be imported here: RuntimeError: no driver"),
        ({"type": "function"}, "objective.type", "(half:function) is no class derived from Objective"),
        ({"type": "half"}, "objective.type", "(half:Half) does not define token_loss"),
        (
            {"type": "louder"},
            "objective.type",
            "(half:Louder) defines signal, which is a key of every objective; give it",
        ),
        ({"type": "lenient", "belov": 1}, "objective.belov", "did you mean below?"),
        ({"type": "lenient", "below": 2}, "objective.below", "got 2"),
        ({"type": "grpo", "below": 2}, "objective.below", "unknown key"),
    ],
)
def test_what_cannot_be_an_objective_is_refused(site, objective, field, message):
    found_field, answer = refusal(objective=objective)
    assert found_field == field
    assert message in answer
    assert "\n" not in answer


def test_mode_that_the_class_does_not_have_is_refused(site):
    (site / "lenient.py").write_text(MODULE + "\nLenient.modes = ('sync',)\n")
    field, message = refusal(objective={"type": "lenient"})
    assert field == "schedule.mode"
    assert message.startswith("objective lenient cannot run in periodic; use sync")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("token_loss = lambda self, inputs: (inputs.advantages.sum(), None)", r"token_loss returns has shape \[\]"),
        (
            "token_loss = lambda self, inputs: (inputs.advantages, inputs.advantages[:1] > 0)",
            r"is_clipped returns .*\[1\]",
        ),
        ("advantages = lambda self, rewards: rewards.std()", r"advantages returns has shape \[\]; expected is \[\d\]"),
    ],
)
def test_numbers_of_another_shape_train_nothing(site, tmp_path, wrong, words):
    (site / "lenient.py").write_text(f"{MODULE}\nLenient.{wrong}\n")
    config = job_config(objective={"type": "lenient"})
    with pytest.raises(ValueError, match=f"objective lenient: what .*{words}"):
        train(config, recorded_iterations(), tmp_path)


def test_package_cannot_take_a_name_of_onbeat(site):
    assert type(job_config(objective={"type": "grpo"}).objective) is GrpoObjective


@pytest.fixture
def foreign(config, monkeypatch):
    """Return the record of a job whose package is not installed here."""
    INSTALLED.clear()
    monkeypatch.setattr(objectives, "entry_points", lambda group: ())
    return {"config": config.model_dump_json()}


def test_job_is_read_where_its_objective_is_not_installed(foreign):
    config = JobConfig.of_job(foreign)
    assert isinstance(config.objective, ForeignObjective)
    assert json.loads(config.model_dump_json()) == json.loads(foreign["config"])


def test_trainer_without_the_package_says_so(foreign):
    with pytest.raises(ValueError, match=r"^no objective 'lenient' is installed here; .*each trainer runs$"):
        run_job(None, SimpleNamespace(config=JobConfig.of_job(foreign)), ALONE)
