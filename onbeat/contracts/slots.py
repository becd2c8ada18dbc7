"""The sources that take turns at a job's prompts, by their weights: a pure function of the weights and the slot.

With w the share of a source and c its number of earlier slots, slot k belongs to the source with the earliest deadline
ceil((c + 1) / w) among those with floor(c / w) <= k; the first of several with the same deadline. So every source has
had within one of its share after every slot. Whole weights without a common divisor repeat after as many slots as their
sum: one period is computed, and the rest is arithmetic.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_SOURCES = 8
MAX_PERIOD = 10_000  # slots


@dataclass(frozen=True)
class Slots:
    """The sources of all slots from 0 on.

    >>> slots = Slots.by_weights([0.5, 0.25, 0.25])
    >>> [slots.source(slot) for slot in range(8)], slots.count(0, 7)
    ([0, 1, 0, 2, 0, 1, 0, 2], 4)
    """

    period: bytes  # the source of each slot of one period

    @classmethod
    def by_weights(cls, weights: Sequence[float]) -> "Slots":
        """Compute the turns. Raises ValueError, with a remedy, for weights that sum to 0 or repeat too late."""
        return cls(compute_period(tuple(weights)))

    def source(self, slot: int) -> int:
        return self.period[slot % len(self.period)]

    def count(self, source: int, slot: int) -> int:
        """Return how many slots before this one belong to the source."""
        num_periods, rest = divmod(slot, len(self.period))
        return num_periods * self.period.count(source) + self.period.count(source, 0, rest)


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the same proportion; 0.1 means a tenth. Raises ValueError.

    >>> whole_weights([0.5, 0.3, 0.2])
    (5, 3, 2)
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    if not any(fractions):
        raise ValueError(
            "the weights sum to 0, so that no source has prompts; give at least one source a weight above 0"
        )
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    whole = [int(fraction * unit) for fraction in fractions]
    divisor = math.gcd(*whole)
    if (period := sum(whole) // divisor) > MAX_PERIOD:
        shown = ", ".join(map(str, weights))
        most = f"at most {MAX_PERIOD} are allowed; use rounder weights, such as 0.333 and 0.667"
        raise ValueError(f"the turns of weights {shown} repeat after {period} prompts, and {most}")
    return tuple(number // divisor for number in whole)


@functools.lru_cache(maxsize=64)
def compute_period(weights: tuple[float, ...]) -> bytes:
    """Return the source of each slot of one period. Raises ValueError as `whole_weights` does."""
    whole = whole_weights(weights)
    total, counts, period = sum(whole), [0] * len(whole), bytearray()
    for slot in range(total):
        _, source = min(
            (-(-(count + 1) * total // weight), source)
            for source, (count, weight) in enumerate(zip(counts, whole, strict=True))
            if weight and count * total // weight <= slot
        )
        counts[source] += 1
        period.append(source)
    return bytes(period)
