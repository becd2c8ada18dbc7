"""Texts that are sent to others: paths in them keep their last part only."""

import re
from typing import Any

FILES = r"\.(?:jsonl?|parquet|csv|arrow|txt|toml|safetensors|zst|gz)"
ABSOLUTE = re.compile(r"(?<![\w/:.~-])(?:~|file://)?/(?:[^/\s\"'<>|:,;]+/)+([^/\s\"'<>|:,;]*)")
WINDOWS = re.compile(r"\b[A-Za-z]:\\(?:[^\\\s\"'<>|:,;]+\\)+([^\\\s\"'<>|:,;]*)")
WHOLE = re.compile(rf"(?:~|\.{{1,2}})?/[^/]+/.*|[A-Za-z]:\\.*|(?!\w+://).*/[^/]*{FILES}")


def without_folders(text: str) -> str:
    """Shorten absolute paths in a text to their last part.

    >>> without_folders("cannot read /home/ada/runs/data.jsonl: see https://example.org/a/b, or and/or")
    'cannot read data.jsonl: see https://example.org/a/b, or and/or'
    """
    return WINDOWS.sub(r"\1", ABSOLUTE.sub(r"\1", text))


def values_without_folders(value: Any) -> Any:
    """Return a configuration whose paths are shortened. Names on a hub stay as they are.

    >>> values_without_folders({"path": "/home/ada/my data/a.jsonl", "model": {"path": "org/model-0.5B"}})
    {'path': 'a.jsonl', 'model': {'path': 'org/model-0.5B'}}
    """
    if isinstance(value, dict):
        return {name: values_without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [values_without_folders(item) for item in value]
    if not isinstance(value, str):
        return value
    if "\n" not in value and WHOLE.fullmatch(value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return without_folders(value)
