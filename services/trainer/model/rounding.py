"""The start of float32 masters, chosen so that a bfloat16 model learns from its first step.

The master, rounded to bfloat16, is used in computation and published. A bfloat16 model has each weight in the middle of
its cell, the numbers that round to it. A cell near 0.1 is 0.0005 wide: at learning rate 2e-5 a master has to move a
dozen steps in one direction before its weight moves at all, and until then nothing is learned.

    masters in the middle   | . . . . x . . . . | . . . . x . . . . |     no master crosses a border for many steps
    masters spread          | . x . . . . . . . | . . . . . . . x . |     at each step some cross: right on average

The mean of the published change is the mean of the masters' change, whatever the step. This is our own choice, measured
in docs/decisions/2026-11-22-masters-start-spread-over-their-cells.md.
"""

import zlib

import torch

HALF_CELL = (1 << 15) - 1  # float32 numbers to either side of a bfloat16 number that round to it


@torch.no_grad()
def spread_masters(name: str, weights: torch.Tensor) -> torch.Tensor:
    """Return masters for one parameter, of its shape: at random places of their cells if it is bfloat16, else a copy.

    They round to the weights, bit for bit, and are the same in each process that has the parameter's name, shape and
    kind of device. Zero stays zero. float64 stays float64; anything else becomes float32.
    """
    masters = weights.to(torch.promote_types(weights.dtype, torch.float32), copy=True)
    if weights.dtype is torch.bfloat16:
        generator = torch.Generator(weights.device).manual_seed(zlib.crc32(name.encode()))
        place = torch.empty(weights.shape, dtype=torch.int32, device=weights.device)
        place.random_(-HALF_CELL, HALF_CELL + 1, generator=generator)
        # Neighbours among float32 numbers of one sign are neighbours as integers.
        masters.view(torch.int32).add_(place.mul_(masters != 0))
    return masters
