"""The numbers that foreign code returns as a reward and its parts."""

import numbers
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

from onbeat.streams.codec import MAX_REWARD

BOUNDS = f"not a number from -{MAX_REWARD} to {MAX_REWARD}"


class InvalidReward(Exception):
    """Foreign code returned something that is no reward, or a number out of bounds."""


def check_numbers(parts: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numbers by name. Raises InvalidReward."""
    for name in parts:
        if str(name).encode(errors="replace").decode() != str(name):  # half a surrogate pair, which JSON cannot hold
            raise InvalidReward(f"the part named {name!a} has a name that is no text")
    return {str(name): check_number(str(name), value) for name, value in parts.items()}


def check_number(name: str, value: Any) -> float:
    """Return a Python number, a Decimal, a numpy scalar, or the element of an array or tensor of one element. Raises
    InvalidReward.

    >>> check_number("reward", True), check_number("reward", Decimal("0.5"))
    (1.0, 0.5)
    """
    element = value
    if not isinstance(value, numbers.Real | Decimal) and callable(getattr(value, "item", None)):
        with suppress(ValueError, RuntimeError, TypeError):  # numpy and PyTorch: it has several elements, or none
            element = value.item()
    if not isinstance(element, numbers.Real | Decimal):
        raise InvalidReward(f"{name} is {value!r:.200} ({describe_type(value)}), {BOUNDS}")
    with suppress(OverflowError, ValueError):  # an integer beyond every float; a signalling NaN
        if -MAX_REWARD <= (number := float(element)) <= MAX_REWARD:
            return number
    raise InvalidReward(f"{name} is {value!r:.200}, {BOUNDS}")


def describe_type(value: Any) -> str:
    """Return the name of the value's type, with its shape if it has one.

    >>> describe_type("4"), describe_type(memoryview(b"ab"))
    ('str', 'memoryview of shape (2,)')
    """
    shape = getattr(value, "shape", None)
    return type(value).__name__ + ("" if shape is None else f" of shape {tuple(shape)}")
