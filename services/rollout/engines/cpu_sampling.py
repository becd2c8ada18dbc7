"""A sampler for the CPU in a few vectorised passes over the probabilities. vLLM's own kernel takes a scalar exponential
of every logit.

It inverts the distribution function: it draws the token at which the running sum of the probabilities first exceeds a
uniform number. Sums of blocks say in which block that is, so only one block of each row is added up token by token.

Legend: B rows, V vocabulary, N blocks.
"""

import torch

BLOCK = 128  # tokens
NUM_SEEDS = 1 << 31  # vLLM draws a row's seed from [0, 2^31)


def sample(logits_BV: torch.Tensor, seeds_B: torch.Tensor) -> torch.Tensor:
    """Draw [B] int64: a token of softmax(logits) for each row, a function of the row and its seed alone.

    logits_BV: float32, minus infinity for what must not be drawn. seeds_B: int64, uniform in [0, 2^31). A row without a
    distribution (a NaN, or nothing allowed) draws token 0, whose log-probability shows it.
    """
    probabilities = logits_BV.softmax(-1)  # all NaN where there is no distribution
    if padding := -probabilities.shape[1] % BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, padding))
    blocks_BNS = probabilities.unflatten(1, (-1, BLOCK))
    ends_BN = blocks_BNS.sum(-1).double().nan_to_num_(0.0).cumsum(-1)
    wanted_B1 = ((seeds_B.double() + 0.5) / NUM_SEEDS)[:, None] * ends_BN[:, -1:]
    block_B1 = first_above(ends_BN, wanted_B1)
    before_B1 = torch.nn.functional.pad(ends_BN, (1, 0)).gather(1, block_B1)
    within_BS = blocks_BNS[torch.arange(len(block_B1)), block_B1[:, 0]].double().nan_to_num_(0.0).cumsum(-1)
    return (block_B1 * BLOCK + first_above(within_BS, wanted_B1 - before_B1))[:, 0]


def first_above(sums: torch.Tensor, wanted_B1: torch.Tensor) -> torch.Tensor:
    """Return where ascending sums first exceed what is wanted, [B, 1]; at most the last place that adds anything."""
    last_B1 = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.searchsorted(sums, wanted_B1, right=True).minimum(last_B1)
