"""The turns of several sources: shares within one at every slot, whatever the weights are."""

import random
from fractions import Fraction
from math import ceil, floor

import pytest

from onbeat.contracts.slots import MAX_PERIOD, MAX_SOURCES, Slots, whole_weights


def shares_of(weights: list[float]) -> list[Fraction]:
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def random_weights(generator: random.Random) -> list[float]:
    num_sources = generator.randint(1, MAX_SOURCES)
    return [round(generator.random(), generator.choice([1, 2, 3])) for _ in range(num_sources - 1)] + [0.5]


def test_three_sources_keep_their_shares_at_every_slot():
    """1,000 iterations of 32 prompts each."""
    weights = [0.6, 0.3, 0.123]
    slots, shares, counts = Slots.by_weights(weights), shares_of(weights), [0, 0, 0]
    for slot in range(32_000):
        counts[slots.source(slot)] += 1
        assert all(abs(count - share * (slot + 1)) < 1 for count, share in zip(counts, shares, strict=True))


@pytest.mark.parametrize("seed", range(40))
def test_any_weights_keep_their_shares_over_a_period(seed):
    weights = random_weights(random.Random(seed))
    slots, shares = Slots.by_weights(weights), shares_of(weights)
    counts = [0] * len(weights)
    for slot in range(min(2_500, 2 * len(slots.period))):
        counts[slots.source(slot)] += 1
        assert all(abs(count - share * (slot + 1)) < 1 for count, share in zip(counts, shares, strict=True))


def test_slots_follow_the_deadline_rule_beyond_a_period():
    weights = [0.5, 0.3, 0.0, 0.2]
    slots, shares, counts = Slots.by_weights(weights), shares_of(weights), [0, 0, 0, 0]
    for slot in range(47):
        due = [
            (ceil((count + 1) / share), source)
            for source, (count, share) in enumerate(zip(counts, shares, strict=True))
            if share and floor(count / share) <= slot
        ]
        assert slots.source(slot) == min(due)[1]
        assert [slots.count(source, slot) for source in range(4)] == counts
        counts[slots.source(slot)] += 1
    assert counts[2] == 0


def test_equal_proportions_give_equal_slots():
    assert Slots.by_weights([1, 2, 1]) == Slots.by_weights([0.25, 0.5, 0.25]) == Slots.by_weights([250, 500, 250])
    assert whole_weights([0.1, 0.2]) == (1, 2)


@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ([0.0, 0.0], "the weights sum to 0, so that no source has prompts; give at least one source a weight above 0"),
        ([1 / 3, 0.5], f"at most {MAX_PERIOD} are allowed; use rounder weights, such as 0.333 and 0.667"),
    ],
)
def test_weights_without_turns_are_refused(weights, sentence):
    with pytest.raises(ValueError, match=sentence):
        Slots.by_weights(weights)
