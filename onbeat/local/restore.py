"""`onbeat restore`: a data folder from the file that `onbeat backup` wrote, checked before it appears."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from onbeat.contracts.errors import OnbeatError
from onbeat.local.archive import open_backup, read_archive
from onbeat.local.backup import check_checkpoints
from onbeat.local.checkpoint_folders import checkpoints_of
from onbeat.local.resting import RecordedJob, read_jobs, resting_redis
from onbeat.machine.disk_space import shortage
from onbeat.process.stacks import CHILDREN_LOCK, OWNER_LOCK
from onbeat.streams.keys import JobKeys


def restore_backup(file: Path, data_dir: Path) -> list[RecordedJob]:
    """Make the data folder, which must not exist or be empty, and return its jobs. Raise OnbeatError.

    The folder appears only when each file has its digest, Redis has read the ledger, and each unfinished job has the
    checkpoint that it goes on from.
    """
    if data_dir.is_dir() and any(data_dir.iterdir()):
        raise OnbeatError(f"{data_dir} is not empty, and nothing is overwritten; name a new folder with --data-dir")
    draft: Path | None = None
    try:
        with open_backup(file) as source:
            data_dir.parent.mkdir(parents=True, exist_ok=True)
            if problem := shortage(data_dir.parent, file.stat().st_size, "the files of the backup"):
                raise OnbeatError(f"{problem}; free disk space, or name a folder on another disk with --data-dir")
            draft = Path(tempfile.mkdtemp(prefix=f"{data_dir.name}.restoring-", dir=data_dir.parent))
            header = read_archive(source, str(file), draft.joinpath)
            with resting_redis(draft) as redis:
                jobs = settle(redis, len(header["jobs"]), draft, data_dir)
            for name in (OWNER_LOCK, CHILDREN_LOCK):
                (draft / name).unlink(missing_ok=True)
            draft.chmod(0o777 & ~current_umask())
            draft.rename(data_dir)
            return jobs
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)  # it is gone if it became the data folder


def settle(redis: Any, num_jobs: int, draft: Path, data_dir: Path) -> list[RecordedJob]:
    """Check the restored ledger, and let its jobs name their checkpoints in the data folder to be. Return the jobs.

    Raise OnbeatError if it has not `num_jobs` jobs, or not the checkpoint that an unfinished job goes on from.
    """
    jobs = read_jobs(redis)
    if len(jobs) != num_jobs:
        raise OnbeatError(f"the backup has {num_jobs} jobs, but its ledger {len(jobs)}; take another backup")
    check_checkpoints(jobs, draft)
    for job in jobs:
        name_checkpoint(redis, job, draft, data_dir)
    return jobs


def name_checkpoint(redis: Any, job: RecordedJob, draft: Path, data_dir: Path) -> None:
    """Let the job's record name its newest checkpoint where it will lie, or none if there is none."""
    numbers = checkpoints_of(draft, job.id)
    if numbers:
        redis.hset(JobKeys(job.id).job, "checkpoint", str(data_dir / numbers[max(numbers)].relative_to(draft)))
    elif job.checkpoint:
        redis.hdel(JobKeys(job.id).job, "checkpoint")


def current_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
