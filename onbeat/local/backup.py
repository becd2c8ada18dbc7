"""`onbeat backup`: what a backup has in it, the files of one moment, of a running or stopped stack.

Ledger and checkpoints are of one moment: while Redis holds back all writes, it forks for its snapshot and the
checkpoints get hard links, which stay when the trainer drops a checkpoint. So the file has what a stack would find that
was killed in that moment, and goes on in the same way. `archive` has the format of the file.
"""

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onbeat.contracts.data_folder import REDIS_FOLDER, STATE_DRAFT, STATE_FILE
from onbeat.contracts.errors import OnbeatError
from onbeat.local.archive import new_file, write_archive
from onbeat.local.checkpoint_folders import JOBS, NAME, checkpoints_of, files_in
from onbeat.local.redis_choice import FILE_OF_6, FOLDER_OF_7, RECORD, Release, ask_release_of, write_record
from onbeat.local.resting import RecordedJob, open_redis, read_jobs
from onbeat.machine.disk_space import shortage
from onbeat.process.stacks import CHILDREN_LOCK, OWNER_LOCK, running_stack

DRAFTS = ".backup-"
# These folders and files in the root of a data folder are made again, or belong to processes.
LEFT_OUT = frozenset({"logs", "torchinductor", OWNER_LOCK, CHILDREN_LOCK, STATE_FILE, STATE_DRAFT, REDIS_FOLDER})
FREEZE_S = 10.0  # Redis lets writes through again after this time, even if this process dies
SNAPSHOT_DEADLINE_S = 600.0
POLL_S = 0.05
NUM_TRIES = 20  # looks at a job whose trainer drops checkpoints meanwhile


@dataclass
class Contents:
    """The files of a backup by their names in it."""

    jobs: list[RecordedJob]
    files: dict[str, Path] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values() if path.exists())


def write_backup(data_dir: Path, file: Path) -> Contents:
    """Write the backup of a running or stopped local stack, and return what is in it. Raise OnbeatError.

    Nothing appears under the file's name before all of it is on disk.
    """
    if not (data_dir / REDIS_FOLDER).is_dir():
        where = "name a folder with --data-dir, or compose's stack with --compose"
        raise OnbeatError(f"{data_dir} has no jobs: there is nothing to back up; {where}")
    with new_file(file) as output, open_redis(data_dir) as redis:
        is_running = running_stack(data_dir) is not None
        with take_contents(redis, data_dir, data_dir, is_running) as contents:
            if problem := shortage(file.parent, contents.num_bytes, "the files of the backup"):
                raise OnbeatError(f"{problem}; free disk space, or write it to another disk")
            write_archive(output, contents.jobs, contents.files)
            return contents


@contextmanager
def take_contents(redis: Any, data_dir: Path, disk: Path, is_running: bool) -> Iterator[Contents]:
    """Yield the files of one moment; the snapshot and the links to checkpoints are removed in the end.

    `disk`: a folder on the disk of the checkpoints, for the links. Nothing changes the checkpoints of a stopped stack.
    """
    snapshot = data_dir / REDIS_FOLDER / redis.config_get("dbfilename")["dbfilename"]
    drafts = disk / f"{DRAFTS}{secrets.token_hex(4)}"
    try:
        drafts.mkdir()
        contents = freeze(redis, data_dir, drafts if is_running else None)
        if redis.info("persistence")["rdb_last_bgsave_status"] != "ok":
            raise OnbeatError(f"Redis could not write its snapshot {snapshot}; is the disk full? See the log of Redis")
        contents.files |= {name_in(path, data_dir): path for path in other_files(data_dir, is_running)}
        contents.files |= ledger_files(ask_release_of(redis), snapshot, drafts)
        yield contents
    finally:
        shutil.rmtree(drafts, ignore_errors=True)
        snapshot.unlink(missing_ok=True)


def freeze(redis: Any, data_dir: Path, links: Path | None) -> Contents:
    """Take the ledger and the checkpoints of one moment, and wait for the end of the snapshot.

    Return the jobs, and the links to the checkpoints if `links` is a folder for them.
    """
    from redis.exceptions import ResponseError

    deadline = time.monotonic() + SNAPSHOT_DEADLINE_S
    while True:
        wait_for_children(redis, deadline)
        try:
            with frozen(redis):
                redis.bgsave(schedule=False)
                contents = Contents(read_jobs(redis), {} if links is None else link_checkpoints(data_dir, links))
                check_checkpoints(contents.jobs, links or data_dir)
            break
        except ResponseError as error:  # it has just begun to rewrite its append-only file
            if "in progress" not in str(error) and "child process" not in str(error):
                raise
    wait_for_children(redis, deadline)
    return contents


@contextmanager
def frozen(redis: Any) -> Iterator[None]:
    """Hold back every write to Redis for the block. Raise OnbeatError if that took too long to be sure of."""
    began = time.monotonic()
    redis.execute_command("CLIENT", "PAUSE", int(FREEZE_S * 1000), "WRITE")
    try:
        yield
    finally:
        redis.execute_command("CLIENT", "UNPAUSE")
    if time.monotonic() - began > 0.9 * FREEZE_S:
        raise OnbeatError(f"a snapshot was not begun within {FREEZE_S:.0f} s; try again when the machine is less busy")


def wait_for_children(redis: Any, deadline: float) -> None:
    """Wait until Redis writes neither a snapshot nor a new append-only file. Raise OnbeatError at the deadline."""
    while (info := redis.info("persistence"))["rdb_bgsave_in_progress"] or info["aof_rewrite_in_progress"]:
        if time.monotonic() > deadline:
            raise OnbeatError(f"Redis wrote for longer than {SNAPSHOT_DEADLINE_S:.0f} s; is its disk slow?")
        time.sleep(POLL_S)


def link_checkpoints(data_dir: Path, links: Path) -> dict[str, Path]:
    """Link the files of all complete checkpoints. Return the links by the names of the files."""
    files: dict[str, Path] = {}
    for job in sorted((data_dir / JOBS).glob("*")):
        for _ in range(NUM_TRIES):
            folders = [link_folder(folder, data_dir, links) for folder in checkpoints_of(data_dir, job.name).values()]
            if all(folders):  # else a trainer has just dropped one, and may have written another
                break
        for folder in folders:
            files |= folder
    return files


def link_folder(folder: Path, data_dir: Path, links: Path) -> dict[str, Path]:
    """Link the files of a checkpoint. Return the links by the names of the files, none if it is being dropped."""
    files = {}
    shutil.rmtree(links / name_in(folder, data_dir), ignore_errors=True)
    for path in files_in(folder):
        name = name_in(path, data_dir)
        (links / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, links / name)
        except FileNotFoundError:
            return {}
        except OSError as error:
            remedy = "stop the stack (`onbeat down`), and try again: then they are copied from their place"
            raise OnbeatError(f"the disk of {data_dir} has no hard links ({error.strerror}); {remedy}") from error
        files[name] = links / name
    return files if f"{name_in(folder, data_dir)}/state.json" in files else {}


def check_checkpoints(jobs: list[RecordedJob], data_dir: Path) -> None:
    """Raise OnbeatError for an unfinished job that would go on from a checkpoint that is not in the folder."""
    for job in jobs:
        newest = max(checkpoints_of(data_dir, job.id), default=0)
        if not job.state.is_final and newest < job.checkpoint_iteration:
            raise OnbeatError(
                f"job {job.id} goes on from its checkpoint after {job.checkpoint_iteration} iterations, which is not "
                f"in jobs/{job.id}/checkpoints; put it back, or cancel the job"
            )


def ledger_files(release: Release, snapshot: Path, drafts: Path) -> dict[str, Path]:
    """Return the files that make the snapshot the base of an append-only file: with one, Redis ignores a snapshot."""
    write_record(drafts, release)
    files = {f"{REDIS_FOLDER}/{RECORD}": drafts / RECORD}
    if release.version < (7, 0):
        return files | {f"{REDIS_FOLDER}/{FILE_OF_6}": snapshot}
    manifest, base = drafts / "manifest", f"{FILE_OF_6}.1.base.rdb"
    manifest.write_text(f"file {base} seq 1 type b\n", "utf-8")
    in_folder = f"{REDIS_FOLDER}/{FOLDER_OF_7}"
    return files | {f"{in_folder}/{base}": snapshot, f"{in_folder}/{FILE_OF_6}.manifest": manifest}


def other_files(data_dir: Path, is_linked: bool) -> Iterator[Path]:
    """Yield the files beside the ledger, without the checkpoints if they are linked."""
    for root in sorted(data_dir.iterdir()):
        if root.name in LEFT_OUT or root.name.startswith(DRAFTS):
            continue
        for path in [root] if root.is_file() else files_in(root):
            parts = path.relative_to(data_dir).parts
            is_checkpoint = parts[0] == JOBS and len(parts) > 3 and parts[2] == "checkpoints"
            if not (is_checkpoint and (parts[3].endswith(".partial") or (is_linked and NAME.fullmatch(parts[3])))):
                yield path


def name_in(path: Path, data_dir: Path) -> str:
    return path.relative_to(data_dir).as_posix()
