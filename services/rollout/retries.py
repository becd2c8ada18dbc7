"""The delay before something is tried again that others provide: a reward, a tool server."""

import random

FIRST_DELAY_S = 0.5  # longest delay after the first failure, doubled after each further one
LONGEST_DELAY_S = 20.0


def delay_after(num_failures: int) -> float:
    """Return seconds: a random time, so that many rollouts do not come back at once, up to a bound that doubles."""
    return random.uniform(0, min(FIRST_DELAY_S * 2 ** min(num_failures - 1, 10), LONGEST_DELAY_S))
