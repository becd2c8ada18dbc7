"""The numbers that foreign code returns as a reward and its parts."""

import numbers
from collections.abc import Mapping
from typing import Any

from onbeat.streams.codec import MAX_REWARD


class InvalidReward(Exception):
    """Foreign code returned something that is no reward, or a number out of bounds."""


def check_numbers(parts: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numbers by name. Raises InvalidReward."""
    for name, value in parts.items():
        if str(name).encode(errors="replace").decode() != str(name):  # half a surrogate pair, which JSON cannot hold
            raise InvalidReward(f"the part named {name!a} has a name that is no text")
        is_number = isinstance(value, numbers.Real)
        if not is_number or not -MAX_REWARD <= value <= MAX_REWARD:
            raise InvalidReward(f"{name} is {value!r}, not a number from -{MAX_REWARD} to {MAX_REWARD}")
    return {str(name): float(value) for name, value in parts.items()}
