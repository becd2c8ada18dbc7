"""The checkpoints of a data folder by name and size, without PyTorch: `jobs/JOB/checkpoints/iteration-000040`."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

NAME = re.compile(r"iteration-(\d{6,})")  # a copy that a user made beside it has another name
JOBS = "jobs"


def checkpoints_of(data_dir: Path, job_id: str) -> dict[int, Path]:
    """Return the complete checkpoints of a job by the number of iterations that they contain, ascending."""
    folders = (path.parent for path in (data_dir / JOBS / job_id / "checkpoints").glob("iteration-*/state.json"))
    numbers = {int(name[1]): folder for folder in folders if (name := NAME.fullmatch(folder.name))}
    return dict(sorted(numbers.items()))


def partial_checkpoints(data_dir: Path) -> list[Path]:
    """Return folders that a trainer began to write and has not completed, or was just removing, when it was killed."""
    folders = [path for path in (data_dir / JOBS).glob("*/checkpoints/*") if path.is_dir()]
    return [
        path
        for path in sorted(folders)
        if path.name.endswith(".partial") or (NAME.fullmatch(path.name) and not (path / "state.json").is_file())
    ]


def files_in(folder: Path) -> Iterator[Path]:
    """Yield the regular files below a folder, in order; links to folders are not followed."""
    for parent, folders, names in os.walk(folder):
        folders.sort()
        yield from (path for name in sorted(names) if (path := Path(parent, name)).is_file())


def size_of(path: Path) -> int:
    """Return the bytes of a file, or of all files below a folder; 0 for what is gone."""
    total = 0
    for file in [path] if path.is_file() else files_in(path):
        try:
            total += file.lstat().st_size
        except FileNotFoundError:  # a service has removed it meanwhile
            continue
    return total
