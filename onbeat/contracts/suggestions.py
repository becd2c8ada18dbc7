"""Suggestions of known names in place of an unknown one."""

import difflib
from collections.abc import Iterable, Sequence


def close_names(wrong: str, known: Iterable[str], most: int = 3, likeness: float = 0.5) -> list[str]:
    """Return up to `most` known names that are written like the wrong one (1: equal), the closest first."""
    return difflib.get_close_matches(wrong, list(known), n=most, cutoff=likeness)


def suggest(close: Sequence[str], known: Iterable[str]) -> str:
    """Return the question for the close names, or the list of all names where none is close.

    >>> suggest(close_names("exactt", ["exact", "math"]), ["exact", "math"]), suggest([], ["math", "exact"])
    ('did you mean exact?', 'there are: exact, math')
    """
    return f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(sorted(known))}"
