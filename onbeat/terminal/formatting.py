"""Numbers, durations and curves as text for people."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return one block per value (means of neighbours when there are too many), from the lowest to the highest value.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale + 0.5)] for value in values)


def duration(seconds: float) -> str:
    """Format seconds: 7 s, 2 min 05 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(value: float | None, spec: str) -> str:
    return format(value, spec) if value is not None else "-"


def printable(value: Any) -> str:
    """Escape control characters visibly, so that text from a model or a server cannot move the cursor."""
    text = str(value)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
