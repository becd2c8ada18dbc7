"""The options of reasoning_gym's tasks: some tasks make text of them that their scorers run as code."""

import re
from typing import Any

CODE = re.compile(r"[()\[\]{}'\"`\\;\n]|__")


def find_code(value: Any) -> str | None:
    """Return the first text that could be more than a word or a number, at any depth; None if there is none.

    >>> find_code({"symbols": ["x", "print(1)"]})
    'print(1)'
    """
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list | tuple):
        return next((code for item in value if (code := find_code(item)) is not None), None)
    return value if isinstance(value, str) and CODE.search(value) else None
