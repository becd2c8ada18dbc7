"""`onbeat restore`: a data folder from the file that `onbeat backup` wrote, checked before it appears."""

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from onbeat.contracts.errors import OnbeatError
from onbeat.local.backup import CHUNK_BYTES, DIGESTS, FORMAT, HEADER, check_checkpoints
from onbeat.local.checkpoint_folders import checkpoints_of
from onbeat.local.resting import RecordedJob, read_jobs, resting_redis
from onbeat.machine.disk_space import shortage
from onbeat.process.stacks import CHILDREN_LOCK, OWNER_LOCK
from onbeat.streams.keys import JobKeys

MAX_TEXT_BYTES = 1 << 28  # largest header, and largest list of digests


def restore_backup(file: Path, data_dir: Path) -> list[RecordedJob]:
    """Make the data folder, which must not exist or be empty, and return its jobs. Raise OnbeatError.

    The folder appears only when each file has its digest, Redis has read the ledger, and each unfinished job has the
    checkpoint that it goes on from.
    """
    if data_dir.is_dir() and any(data_dir.iterdir()):
        raise OnbeatError(f"{data_dir} is not empty, and nothing is overwritten; name a new folder with --data-dir")
    draft: Path | None = None
    try:
        data_dir.parent.mkdir(parents=True, exist_ok=True)
        if problem := shortage(data_dir.parent, file.stat().st_size, "the files of the backup"):
            raise OnbeatError(f"{problem}; free disk space, or name a folder on another disk with --data-dir")
        draft = Path(tempfile.mkdtemp(prefix=f"{data_dir.name}.restoring-", dir=data_dir.parent))
        jobs = fill(draft, file, data_dir)
        draft.chmod(0o777 & ~current_umask())
        draft.rename(data_dir)
        return jobs
    except tarfile.TarError as error:
        raise OnbeatError(f"{file} is no backup of Onbeat, or is damaged: {error}") from error
    except OSError as error:
        raise OnbeatError(f"{file} cannot be restored: {error}") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)  # it is gone if it became the data folder


def fill(draft: Path, file: Path, data_dir: Path) -> list[RecordedJob]:
    """Extract and check the backup. Return its jobs, whose records name checkpoints in the data folder to be."""
    header = extract(file, draft)
    with resting_redis(draft) as redis:
        jobs = read_jobs(redis)
        check_checkpoints(jobs, draft)
        for job in jobs:
            name_checkpoint(redis, job, draft, data_dir)
    for name in (OWNER_LOCK, CHILDREN_LOCK):
        (draft / name).unlink(missing_ok=True)
    if len(jobs) != len(header["jobs"]):
        raise OnbeatError(f"{file} has {len(header['jobs'])} jobs, but its ledger {len(jobs)}; take another backup")
    return jobs


def extract(file: Path, draft: Path) -> dict[str, Any]:
    """Extract the files, and compare their digests. Return the header. Raise OnbeatError, TarError or OSError."""
    digests: dict[str, str] = {}
    header: dict[str, Any] | None = None
    expected: dict[str, str] | None = None
    with tarfile.open(file, mode="r|", bufsize=CHUNK_BYTES) as archive:
        for entry in archive:
            if header is None:
                header = read_header(archive, entry, file)
            elif entry.name == DIGESTS:
                expected = json.loads(read_text(archive, entry))
            else:
                digests[entry.name] = extract_file(archive, entry, draft)
    if expected is None:
        raise OnbeatError(f"{file} is cut off: it has no {DIGESTS} at its end; take another backup")
    wrong = [name for name in sorted(expected.keys() | digests.keys()) if expected.get(name) != digests.get(name)]
    if wrong:
        raise OnbeatError(f"{file} is damaged: {wrong[0]} is not what was backed up; take another backup")
    assert header is not None
    return header


def read_header(archive: tarfile.TarFile, entry: tarfile.TarInfo, file: Path) -> dict[str, Any]:
    """Return the header. Raise OnbeatError if the file is no backup, or one of another format."""
    try:
        header: dict[str, Any] = json.loads(read_text(archive, entry)) if entry.name == HEADER else {}
    except ValueError:
        header = {}
    if "format" not in header:
        raise OnbeatError(f"{file} is no backup of Onbeat: it does not begin with {HEADER}")
    if header["format"] != FORMAT:
        made_by = f"Onbeat {header.get('onbeat')} wrote it"
        raise OnbeatError(
            f"{file} has format {header['format']}, this version reads {FORMAT}: {made_by}; restore there"
        )
    return header


def read_text(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> str:
    source = archive.extractfile(entry)
    if source is None or entry.size > MAX_TEXT_BYTES:
        raise OnbeatError(f"{entry.name} of the backup is not what Onbeat writes")
    return source.read().decode()


def extract_file(archive: tarfile.TarFile, entry: tarfile.TarInfo, draft: Path) -> str:
    """Write one file, which may only lie in the folder. Return the digest of what was read."""
    name, source = PurePosixPath(entry.name), archive.extractfile(entry) if entry.isreg() else None
    if source is None or name.is_absolute() or ".." in name.parts or not name.parts:
        raise OnbeatError(f"the backup has {entry.name!r}, which is no file of a data folder; nothing was restored")
    target = draft / name
    target.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with target.open("xb") as output:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    target.chmod(entry.mode & 0o777)
    return digest.hexdigest()


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
