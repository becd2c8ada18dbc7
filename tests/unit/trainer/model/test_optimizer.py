"""The optimizer against PyTorch's own in float64, and what is left of an update's gradient after its step."""

import copy

import pytest
import torch

from onbeat.config import OptimizerConfig
from services.trainer.model.optimizer import MasterAdamW
from tests.trainer_fixtures import tiny_model

CONFIG = OptimizerConfig(learning_rate=1e-3, weight_decay=0.1, max_grad_norm=0.5)
TOKENS = 37.0  # the divisor of the sums


def random_sums(optimizer, seed):
    """Add up random gradients, and return them in float64."""
    generator = torch.Generator().manual_seed(seed)
    sums = optimizer.gradients()
    for gradient in sums.values():
        gradient.copy_(torch.randn(gradient.shape, generator=generator))
    return {name: gradient.double() for name, gradient in sums.items()}


def take_step(optimizer):
    optimizer.rescale(TOKENS)
    norm = optimizer.clip()
    optimizer.step()
    return norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_adamw_in_float64(dtype):
    """Each sum is divided and clipped once, also when steps follow one another."""
    optimizer = MasterAdamW(tiny_model(dtype=dtype), CONFIG)
    exact = {name: master.detach().double().requires_grad_() for name, master in optimizer.masters.items()}
    options = {"lr": CONFIG.learning_rate, "betas": CONFIG.betas, "eps": CONFIG.eps, "weight_decay": 0.1}
    adamw = torch.optim.AdamW(exact.values(), **options)
    for seed in range(3):
        for name, gradient in random_sums(optimizer, seed).items():
            exact[name].grad = gradient / TOKENS
        norm = torch.nn.utils.clip_grad_norm_(exact.values(), CONFIG.max_grad_norm)
        adamw.step()
        assert take_step(optimizer) == pytest.approx(norm.item(), rel=1e-6)
        assert norm > CONFIG.max_grad_norm
        for name, master in optimizer.masters.items():
            torch.testing.assert_close(master.double(), exact[name], rtol=0, atol=2e-6)
            assert torch.equal(optimizer.parameters[name], master.to(dtype))


def test_gradients_are_read_as_rescaled_and_clipped():
    """Gradient control and a search for what is not finite read them between clip and step."""
    optimizer = MasterAdamW(tiny_model(dtype=torch.float32), CONFIG)
    sums = random_sums(optimizer, seed=0)
    optimizer.rescale(TOKENS)
    whole = torch.stack([gradient.norm() for gradient in sums.values()]).norm() / TOKENS
    factor = (CONFIG.max_grad_norm / whole).item() / TOKENS
    optimizer.clip()
    read = copy.deepcopy(optimizer.gradients())
    for name, gradient in optimizer.gradients().items():  # reading again changes nothing
        torch.testing.assert_close(gradient.double(), sums[name] * factor, rtol=1e-5, atol=0)
        assert torch.equal(gradient, read[name])


def test_dropped_gradients_leave_nothing_to_the_next_ones():
    optimizer = MasterAdamW(tiny_model(dtype=torch.float32), CONFIG)
    random_sums(optimizer, seed=0)
    optimizer.rescale(TOKENS)
    optimizer.clip()
    optimizer.drop_gradients()
    for master in optimizer.masters.values():
        master.grad = torch.ones_like(master)  # as a pass adds it, without a call of `gradients`
    assert all(gradient.eq(1.0).all() for gradient in optimizer.gradients().values())
