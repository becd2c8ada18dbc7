"""Objectives, and what they are made of, against worked numbers."""

import math

import pytest
import torch
from pydantic import ValidationError

from onbeat.contracts.section import IS_ACCEPTED
from onbeat.objectives import check_installed
from onbeat.objectives.base import LossInputs
from onbeat.objectives.base.importance import BandImportance, TruncatedImportance
from onbeat.objectives.base.kl import KlConfig, kl_estimate
from onbeat.objectives.grpo import GrpoObjective
from onbeat.objectives.gspo import GspoObjective
from onbeat.objectives.rloo import RlooObjective


def test_grpo_clips_only_where_the_surrogate_would_gain():
    log = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5, 1.0])).requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 2.0])
    inputs = LossInputs(log, torch.zeros(5), advantages, torch.tensor([5]))
    loss, is_clipped = GrpoObjective(clip_low=0.2, clip_high=0.3).token_loss(inputs)
    torch.testing.assert_close(loss, torch.tensor([-1.3, 1.5, -0.5, 0.8, -2.0]))
    assert is_clipped.tolist() == [True, False, False, True, False]
    loss.sum().backward()
    torch.testing.assert_close(log.grad, torch.tensor([0.0, 1.5, -0.5, 0.0, -2.0]))


def test_kl_estimators_agree_with_the_exact_kl():
    """Expectation over the policy of k1 and k3 is KL(policy || reference), summed over a small vocabulary."""
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    exact = (policy.exp() * (policy - reference)).sum()
    for estimator in ("k1", "k3"):
        torch.testing.assert_close((policy.exp() * kl_estimate(estimator, policy, reference)).sum(), exact)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", "nothing"), ("k2", "reverse"), ("k3", "forward")])
def test_gradients_of_kl_estimators_in_the_loss(estimator, expected):
    """Over the policy's samples: k1 none, k2 that of KL(policy || reference), k3 that of KL(reference || policy)."""
    logits = torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    policy = logits.log_softmax(-1)
    samples = policy.detach().exp()
    (gradient,) = torch.autograd.grad(
        (samples * kl_estimate(estimator, policy, reference)).sum(), logits, retain_graph=True
    )
    divergences = {
        "nothing": 0.0 * policy.sum(),
        "reverse": (policy.exp() * (policy - reference)).sum(),
        "forward": (reference.exp() * (reference - policy)).sum(),
    }
    (wanted,) = torch.autograd.grad(divergences[expected], logits)
    torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize(("estimator", "is_right"), [("k1", True), ("k2", False), ("k3", False)])
def test_gradients_of_kl_estimators_in_the_reward(estimator, is_right):
    """Only k1 has that of KL(policy || reference); the others push away from the reference."""
    logits = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    policy = logits.log_softmax(-1)
    penalty = kl_estimate(estimator, policy, reference).detach()
    (gradient,) = torch.autograd.grad((policy.detach().exp() * penalty * policy).sum(), logits, retain_graph=True)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits)
    if is_right:
        torch.testing.assert_close(gradient, wanted)
        assert KlConfig(coef=0.1, estimator=estimator, placement="reward").estimator == estimator
    else:
        assert (gradient * wanted).sum() < 0
        with pytest.raises(ValidationError, match=f"{estimator} in the reward pulls away from the reference"):
            KlConfig(coef=0.1, estimator=estimator, placement="reward")
        stored = {"type": "grpo", "kl": {"coef": 0.1, "estimator": estimator, "placement": "reward"}}
        older = GrpoObjective.model_validate(stored, context=IS_ACCEPTED)
        check_installed(older)  # a job that was accepted earlier goes on as it began


def test_default_estimator_of_kl_is_right_at_its_place():
    assert KlConfig(coef=0.1).estimator == "k3"
    assert KlConfig(coef=0.1, placement="reward").estimator == "k1"
    with pytest.raises(ValidationError, match="k1 in the loss pulls nowhere"):
        KlConfig(coef=0.1, estimator="k1")


@pytest.mark.parametrize(
    ("gap", "expected"),
    [(-19.0, 1 - math.exp(19)), (-25.0, 0.0), (-60.0, 0.0), (-87.0, 0.0), (25.0, 1.0), (60.0, 1.0)],
)
def test_k3_never_pushes_away_from_the_reference(gap, expected):
    """Gap: policy less reference, in nats. A positive gradient lowers the policy's probability."""
    policy = torch.tensor([gap - 1.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(kl_estimate("k3", policy, torch.tensor([-1.0])).sum(), policy)
    assert gradient.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("gap", "expected"), [(19.0, math.exp(19)), (25.0, 0.0), (-25.0, 0.0)])
@pytest.mark.parametrize("objective", [GrpoObjective(), GspoObjective(type="gspo"), RlooObjective(type="rloo")])
def test_no_gradient_flows_beyond_the_bound_of_ratios(objective, gap, expected):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = LossInputs(logprobs, logprobs.detach() - gap, torch.full((2,), -1.0), torch.tensor([2]))
    (gradient,) = torch.autograd.grad(objective.token_loss(inputs)[0].sum(), logprobs)
    torch.testing.assert_close(gradient, torch.full((2,), expected), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("gap", [100.0, -100.0, 1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_policies_far_apart_give_finite_losses_and_gradients(gap, advantage):
    """float32 overflows at a log ratio of 88, and a clipped infinity has the gradient 0 x inf."""
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    old = logprobs.detach() - gap
    inputs = LossInputs(logprobs, old, torch.full((2,), advantage), torch.tensor([2]))
    losses = [
        GrpoObjective().token_loss(inputs)[0],
        GspoObjective(type="gspo").token_loss(inputs)[0],
        RlooObjective(type="rloo").token_loss(inputs)[0],
        kl_estimate("k3", logprobs, old),
    ]
    for loss in losses:
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()
    weights, is_kept = BandImportance().weights(old, logprobs.detach())
    assert not is_kept.any()
    assert torch.equal(weights, torch.zeros(2))
    assert TruncatedImportance().weights(old, logprobs.detach())[0].isfinite().all()
