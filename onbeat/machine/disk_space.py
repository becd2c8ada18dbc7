"""Free disk space. A program, too, without installation: `python -I onbeat/machine/disk_space.py FOLDER GB WHAT`."""

import os
import shutil
import sys
from pathlib import Path

GB = 10**9


def free_bytes(folder: Path) -> int:
    """Return this user's free bytes on the file system of a folder, which need not exist yet."""
    folder = folder.absolute()
    while not os.path.exists(folder):
        folder = folder.parent
    return shutil.disk_usage(folder).free


def shortage(folder: Path, needed_bytes: float, content: str) -> str:
    """Return a message for the user, or '' if the disk space suffices. `what`: what needs it, in the plural."""
    free = free_bytes(folder)
    if free >= needed_bytes:
        return ""
    return f"{folder} has {free / GB:.1f} GB free, {content} need {needed_bytes / GB:.1f} GB"


def main(arguments: list[str]) -> int:
    folder, needed_gb, content = arguments
    problem = shortage(Path(folder).absolute(), float(needed_gb) * GB, content)
    if problem:
        sys.stderr.write(f"{problem}; free disk space first\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
