"""Malicious and broken input. Every run tries the same; ONBEAT_FUZZ_FACTOR=50 tries 50 times as many, at random."""

import os

from hypothesis import HealthCheck, settings

FUZZ_FACTOR = int(os.environ.get("ONBEAT_FUZZ_FACTOR", "1"))


def fuzzed(num_examples: int) -> settings:
    return settings(
        max_examples=num_examples * FUZZ_FACTOR,
        deadline=None,
        derandomize=FUZZ_FACTOR == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
