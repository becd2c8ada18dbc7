"""GAC on constructed gradients: the cosine after projection is c_low; skip, reset, history and sharding."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onbeat.config import GacConfig
from services.trainer.gac import GacAction, GradientControl, decide
from services.trainer.world import World


def pair(cosine, norm_g=3.0, norm_h=2.0):
    """Gradients g and h in the plane with a given cosine, split over two parameters."""
    h = torch.tensor([norm_h, 0.0], dtype=torch.float64)
    g = torch.tensor([norm_g * cosine, norm_g * math.sqrt(1 - cosine**2)], dtype=torch.float64)
    return [{"a": v[:1].clone(), "b": v[1:].clone()} for v in (g, h)]


@given(st.floats(0.31, 0.94), st.floats(0.0, 0.3), st.floats(0.1, 100), st.floats(0.1, 100), st.booleans())
def test_projection_lands_exactly_on_c_low_or_zero(cosine, c_low, norm_g, norm_h, is_full_removal):
    def cosine_of(left, right):
        left, right = (torch.cat([t for _, t in sorted(g.items())]) for g in (left, right))
        return (left @ right / left.norm() / right.norm()).item()

    g, h = pair(cosine, norm_g, norm_h)
    config = GacConfig(mode="control", c_low=c_low, c_high=0.95, is_full_removal=is_full_removal)
    control = GradientControl(config)
    control.apply(h)
    assert control.apply(g).action is GacAction.PROJECT
    assert cosine_of(g, h) == pytest.approx(0.0 if is_full_removal else c_low, abs=1e-9)


def test_history_of_a_checkpoint_goes_to_the_device_that_trains():
    control = GradientControl(GacConfig(), World(device=torch.device("meta")))
    control.load_state_tensors({"gac.a": torch.ones(2), "master.a": torch.ones(2)})
    assert {name: tensor.device.type for name, tensor in control.state_tensors().items()} == {"gac.a": "meta"}


@pytest.mark.parametrize(
    ("cosine", "action"), [(-0.9, "keep"), (0.0, "keep"), (0.3, "keep"), (0.31, "project"), (0.96, "skip")]
)
def test_regimes(cosine, action):
    g, h = pair(cosine)
    control = GradientControl(GacConfig(mode="control", c_low=0.3 + 1e-12))
    control.apply(h)
    before = {name: value.clone() for name, value in g.items()}
    decision = control.apply(g)
    assert decision.action == action
    assert decision.cosine == pytest.approx(cosine)
    assert all(torch.equal(g[name], before[name]) for name in g) == (action != "project")


def test_as_a_metric_it_never_acts():
    g, h = pair(0.8)
    control = GradientControl(GacConfig(mode="metric"))
    control.apply(h)
    before = {name: value.clone() for name, value in g.items()}
    decision = control.apply(g)
    assert (decision.action, decision.cosine) == (GacAction.KEEP, pytest.approx(0.8))
    assert all(torch.equal(g[name], before[name]) for name in g)


@pytest.mark.parametrize(("dot", "norm_g", "norm_h"), [(0, 0, 1), (0, 1, 0), (math.nan, 1, 1), (1, math.inf, 1)])
def test_no_usable_history_means_no_action(dot, norm_g, norm_h):
    assert decide(dot, norm_g, norm_h, GacConfig()).action is GacAction.NONE


@pytest.mark.parametrize(("history", "expected"), [("raw", 0.8), ("projected", 0.3)])
def test_history_is_the_raw_or_the_projected_gradient(history, expected):
    g, h = pair(0.8)
    control = GradientControl(GacConfig(mode="control", history=history))
    control.apply({name: value.clone() for name, value in h.items()})
    control.apply({name: value.clone() for name, value in g.items()})
    assert control.apply(h).cosine == pytest.approx(expected)


def test_control_that_is_off_keeps_no_history_of_a_checkpoint():
    before, after = (GradientControl(GacConfig(mode=mode)) for mode in ("control", "off"))
    before.apply(pair(0.8)[1])
    after.load_state_tensors(before.state_tensors())
    assert after.state_tensors() == {}
