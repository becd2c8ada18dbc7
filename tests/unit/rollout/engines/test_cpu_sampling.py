"""The sampler of rollouts on a CPU draws what softmax says. Seeds are spread evenly: counts are no matter of luck."""

import pytest
import torch

from services.rollout.engines.cpu_sampling import BLOCK, NUM_SEEDS, sample

NUM_DRAWS = 20_000


def evenly_spread_seeds() -> torch.Tensor:
    return (torch.arange(NUM_DRAWS, dtype=torch.float64) * (NUM_SEEDS / NUM_DRAWS)).long()


@pytest.mark.parametrize("vocabulary", [2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 7])
def test_tokens_come_as_often_as_softmax_says(vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    drawn = sample(logits.expand(NUM_DRAWS, -1), evenly_spread_seeds())
    counts = drawn.bincount(minlength=vocabulary)
    assert len(counts) == vocabulary, "nothing beyond the vocabulary"
    expected = logits.double().softmax(-1) * NUM_DRAWS
    assert (counts - expected).abs().max() < 1.1, (
        "an interval of that length holds that many even steps, give or take one"
    )


@pytest.mark.parametrize("seed", [0, 1, NUM_SEEDS // 2, NUM_SEEDS - 1])
def test_what_is_masked_is_never_drawn(seed: int) -> None:
    logits = torch.full((4, 3 * BLOCK + 5), float("-inf"))
    allowed = [0, BLOCK - 1, BLOCK + 3, 3 * BLOCK + 2]
    logits[torch.arange(4), allowed] = 0.0
    assert sample(logits, torch.full((4,), seed)).tolist() == allowed
    logits = torch.full((1, 3 * BLOCK), float("-inf"))
    logits[0, [7, BLOCK + 9]] = torch.tensor([0.3, -0.2])
    assert sample(logits, torch.tensor([seed])).item() in (7, BLOCK + 9)


@pytest.mark.parametrize("broken", ["nan", "inf", "-inf"])
def test_a_row_without_a_distribution_breaks_no_other(broken: str) -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    seeds = torch.tensor([5, 6, NUM_SEEDS - 1])
    whole = sample(logits, seeds).tolist()
    logits[1] = float(broken)
    assert sample(logits, seeds).tolist() == [whole[0], 0, whole[2]]
    if broken != "-inf":
        logits[1] = 0.0
        logits[1, 700] = float(broken)
        assert sample(logits, seeds).tolist() == [whole[0], 0, whole[2]]


def test_a_row_and_its_seed_alone_decide() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 1000, generator=generator)
    seeds = torch.randint(NUM_SEEDS, (9,), generator=generator)
    together = sample(logits, seeds)
    assert together.tolist() == [sample(logits[row : row + 1], seeds[row : row + 1]).item() for row in range(9)]
    order = torch.randperm(9, generator=generator)
    assert sample(logits[order], seeds[order]).tolist() == together[order].tolist()
