"""Masters start anywhere in the cell of numbers that round to their bfloat16 weight."""

import pytest
import torch

from services.trainer.model.rounding import spread_masters

WEIGHTS = torch.randn(512, 300, generator=torch.Generator().manual_seed(0)).mul(0.1).bfloat16()


def test_masters_round_to_the_weights_they_come_from():
    corners = torch.tensor([0.0, -0.0, 1.0, -2.0, 2.0**-126, -(2.0**-130), 3.3e38, 1.0078125]).bfloat16()
    for weights in (WEIGHTS, corners):
        masters = spread_masters("w", weights)
        assert masters.dtype == torch.float32
        assert torch.equal(masters.bfloat16().view(torch.int16), weights.view(torch.int16))


def test_masters_fill_their_cells_evenly():
    masters = spread_masters("w", WEIGHTS)
    places = masters.view(torch.int32) - WEIGHTS.float().view(torch.int32)
    counts = torch.histc(places.float(), bins=16, min=-(2**15), max=2**15)
    assert counts.min() > 0.95 * WEIGHTS.numel() / 16


@pytest.mark.parametrize("share_of_cell", [0.01, 0.1, 0.2])
def test_a_small_step_moves_published_weights_on_average(share_of_cell):
    def cell_width(weights):
        exponent = torch.frexp(weights.float()).exponent
        return torch.ldexp(torch.ones_like(weights, dtype=torch.float32), exponent - 8)

    step = share_of_cell * cell_width(WEIGHTS)
    published = (spread_masters("w", WEIGHTS) + step).bfloat16().float()
    moved = (published - WEIGHTS.float()).sum() / step.sum()
    assert moved == pytest.approx(1.0, rel=0.1)
    unmoved = (WEIGHTS.float() + step).bfloat16()
    assert torch.equal(unmoved, WEIGHTS), "without spreading, nothing of such a step is published"


def test_each_parameter_has_places_of_its_own_and_keeps_them():
    first = spread_masters("model.layers.0.weight", WEIGHTS)
    assert torch.equal(first, spread_masters("model.layers.0.weight", WEIGHTS))
    assert not torch.equal(first, spread_masters("model.layers.1.weight", WEIGHTS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_precise_weights_are_copied(dtype):
    weights = WEIGHTS.to(dtype)
    masters = spread_masters("w", weights)
    assert masters.dtype == dtype
    assert torch.equal(masters, weights)
    assert masters.data_ptr() != weights.data_ptr()
