"""Gradients in bfloat16 add up in float32 by blocks, and yet to the bits of the plain sum."""

import pytest
import torch

from services.trainer.model import optimizer
from services.trainer.model.optimizer import add_by_blocks


@pytest.mark.parametrize("shape", [(), (5,), (4096,), (700, 37), (37, 700), (2, 9000), (9, 40, 50)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_sum_by_blocks_has_the_bits_of_the_sum(
    shape: tuple[int, ...], is_transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer, "BLOCK_NUMEL", 1000)
    generator = torch.Generator().manual_seed(0)
    total = torch.randn(shape, generator=generator)
    addend = torch.randn(shape, generator=generator).bfloat16()
    if is_transposed and len(shape) == 2:
        addend = addend.T.contiguous().T
    expected = total + addend
    add_by_blocks(total, addend)
    assert torch.equal(total, expected)
