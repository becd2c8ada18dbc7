"""`onbeat clean`: the content of a data folder by kind and size, and the removal of what is not needed any more.

Nothing of a running stack is removed, nor what an unfinished job goes on from; the ledger keeps the jobs themselves.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onbeat.contracts.data_folder import REDIS_FOLDER
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.records import DATASETS_FOLDER
from onbeat.contracts.suggestions import close_names, suggest
from onbeat.local.backup import DRAFTS
from onbeat.local.checkpoint_folders import JOBS, checkpoints_of, partial_checkpoints, size_of
from onbeat.local.resting import RecordedJob, open_redis, read_jobs, resting_redis
from onbeat.process.stacks import running_stack
from onbeat.streams.keys import JobKeys

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Item:
    """Some files of a data folder, removed together."""

    name: str  # the word that names it on the command line; "" for what is not removed
    paths: list[Path]
    meaning: str
    job_id: str = ""

    @property
    def num_bytes(self) -> int:
        return sum(map(size_of, self.paths))


def list_content(data_dir: Path) -> list[Item]:
    """Return what the data folder holds; of a running stack too. Raise OnbeatError if it is no data folder."""
    with ledger_of(data_dir) as redis:
        return sort_content(data_dir, read_jobs(redis))


def clean(data_dir: Path, names: Sequence[str]) -> list[Item]:
    """Remove the named items (names as `list_content` gives them, or ids of jobs), and return them.

    Raise OnbeatError while a stack runs there, ValueError for a name that is not there.
    """
    if (stack := running_stack(data_dir)) is not None:
        stop = "wait for its end" if stack.command == "run" else "stop it first (`onbeat down`)"
        raise OnbeatError(f"a stack of `onbeat {stack.command}` runs in {data_dir}; {stop}")
    check_data_dir(data_dir)
    with resting_redis(data_dir) as redis:
        removed = choose(sort_content(data_dir, read_jobs(redis)), names)
        for item in removed:
            if item.job_id:  # the record must not name a folder that is gone
                redis.hdel(JobKeys(item.job_id).job, "checkpoint")
        # Folders go at once and for good, the ledger first: a killed command leaves files and no wrong record.
        for path in (path for item in removed for path in item.paths):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        return removed


@contextmanager
def ledger_of(data_dir: Path) -> Iterator[Any]:
    check_data_dir(data_dir)
    with open_redis(data_dir) as redis:
        yield redis


def check_data_dir(data_dir: Path) -> None:
    """Raise OnbeatError for a folder in which no stack has run: everything else there is not ours."""
    if not (data_dir / REDIS_FOLDER).is_dir():
        raise OnbeatError(f"{data_dir} is no data folder of a stack; name one with --data-dir")


def choose(items: Sequence[Item], names: Sequence[str]) -> list[Item]:
    """Return the items of these names. Raise ValueError for a name that no item has that can be removed."""
    known = {name for item in items for name in (item.name, item.job_id) if name and item.name}
    for name in names:
        if any(item.job_id == name and not item.name for item in items):
            raise ValueError(f"job {name} is not over, or another job starts from its checkpoint: it is not removed")
        if name not in known:
            raise ValueError(f"there is no {name!r} to remove; {suggest(close_names(name, known), known)}")
    return [item for item in items if item.name and {item.name, item.job_id} & {*names}]


def sort_content(data_dir: Path, jobs: Sequence[RecordedJob]) -> list[Item]:
    """Return the items, those that can be removed first; empty ones are left out."""
    logs = [*sorted((data_dir / "logs").glob("*.log*"))]
    caches = [data_dir / "torchinductor", *(data_dir / DATASETS_FOLDER / name for name in (".lengths", ".hub"))]
    leftovers = [*partial_checkpoints(data_dir), *data_dir.glob(f"{DRAFTS}*"), *(data_dir / REDIS_FOLDER).glob("*.rdb")]
    known = {job.id for job in jobs}
    others = [
        path for path in (data_dir / JOBS).glob("*/*") if path.name != "checkpoints" and path.parent.name in known
    ]
    items = [
        Item("logs", logs, "what the services wrote; `onbeat logs` shows it"),
        Item("caches", caches, "compiled kernels, and data of a hub: made or fetched again when needed"),
        Item("leftovers", leftovers, "checkpoints and backups that a killed process left unfinished"),
        *sort_jobs(data_dir, jobs),
        Item("", others, "files of jobs beside their checkpoints, such as curves for TensorBoard"),
        Item("", [data_dir / DATASETS_FOLDER], "data files, caches included; `onbeat data delete` removes one"),
        Item("", [data_dir / REDIS_FOLDER], "the ledger: jobs, curves, responses; `onbeat jobs delete` removes a job"),
    ]
    return sorted((item for item in items if item.num_bytes), key=lambda item: not item.name)


def sort_jobs(data_dir: Path, jobs: Sequence[RecordedJob]) -> Iterator[Item]:
    """Yield the checkpoints of each job, those that are deleted from the ledger too."""
    records = {job.id: job for job in jobs}
    parents = {parent for job in jobs if not job.state.is_final and (parent := parent_of(job))}
    for folder in sorted((data_dir / JOBS).glob("*")):
        paths, job = list(checkpoints_of(data_dir, folder.name).values()), records.get(folder.name)
        count = f"{len(paths)} checkpoint{'s' * (len(paths) != 1)} of {folder.name}"
        if job is None:
            yield Item(CHECKPOINTS, [folder], f"{count}, a job that was deleted", folder.name)
        elif job.state.is_final and job.id not in parents:
            yield Item(CHECKPOINTS, paths, f"{count} ({job.name}, {job.state.value})", job.id)
        else:
            reason = job.state.value if not job.state.is_final else "another job starts from it"
            yield Item("", paths, f"{count} ({job.name}, {reason})", job.id)


def parent_of(job: RecordedJob) -> str:
    """Return the job whose checkpoint a fork starts from; '' if it is no fork or has a checkpoint of its own."""
    try:
        fork = json.loads(job.config).get("fork") or {}
    except ValueError:
        return ""
    return "" if job.checkpoint_iteration else str(fork.get("job", ""))
