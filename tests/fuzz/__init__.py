"""Malicious and broken input. Every run tries the same; ONBEAT_FUZZ_FACTOR=50 tries 50 times as many, at random."""

import os
from itertools import count
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture.data import ConjectureData
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

FUZZ_FACTOR = int(os.environ.get("ONBEAT_FUZZ_FACTOR", "1"))


def fuzzed(num_examples: int) -> settings:
    return settings(
        max_examples=num_examples * FUZZ_FACTOR,
        deadline=None,
        derandomize=FUZZ_FACTOR == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


class StatefulServerProvider(HypothesisProvider):
    """Draws for a test whose choices depend on answers of a server that keeps its state from one example to the next.

    Hypothesis remembers which choices followed which, to try none twice, and gives up when they lead elsewhere.
    It keeps no such memory for a provider that is not its default one.
    """

    seeds = count()

    def __init__(self, data: ConjectureData | None) -> None:
        super().__init__(data)
        self._random = Random(next(self.seeds) if FUZZ_FACTOR == 1 else None)


AVAILABLE_PROVIDERS["stateful-server"] = f"{__name__}.{StatefulServerProvider.__name__}"
