"""The identity of a file: whether it is still the one that was read."""

import os
from pathlib import Path


def file_identity(path: Path) -> tuple[int, int, int] | None:
    """Return a value that differs after every change, a swapped link included; None when there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
