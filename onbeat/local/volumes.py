"""The volumes of a compose stack as the data folder of a local one: the program of compose's service `storage`.

    volume          in a data folder
    redis           redis/
    trainer         jobs/ lies in it
    broker          everything else, such as datasets/

`onbeat.local.compose` runs it, with these arguments:

    backup                                  write the archive to the standard output; the stack runs
    restore BYTES RELEASE [--replace]       read it from the standard input; the stack is stopped
    settle NUM_JOBS                         check the restored ledger, of which only Redis runs
"""

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO, Any
from urllib.parse import quote

from onbeat.contracts.data_folder import REDIS_FOLDER
from onbeat.contracts.errors import OnbeatError
from onbeat.local.archive import read_archive, write_archive
from onbeat.local.backup import DRAFTS, LEFT_OUT, take_contents
from onbeat.local.checkpoint_folders import JOBS, files_in
from onbeat.local.redis_choice import RECORD, parse_release, release_of_data
from onbeat.local.resting import connect_to
from onbeat.local.restore import settle
from onbeat.machine.disk_space import shortage

VOLUMES = Path("/volumes")
DATA_DIR = Path("/data")  # the trainer's volume in its own container
NAMES = ("redis", "trainer", "broker")
DRAFT = ".restoring"
PASSWORD = "REDISCLI_AUTH"  # environment variable with the password of Redis's admin


def backup(volumes: Path, redis: Any, output: IO[bytes]) -> None:
    """Write the archive of a running stack. Raise OnbeatError."""
    with (
        one_at_a_time(volumes),
        data_folder(volumes) as folder,
        take_contents(redis, folder, volumes / "trainer", is_running=True) as contents,
    ):
        write_archive(output, contents.jobs, contents.files)


def restore(volumes: Path, source: IO[bytes], num_bytes: int, release: str, is_replacing: bool) -> None:
    """Put the files of an archive into the volumes. Raise OnbeatError, and then the volumes have what they had before.

    `release`: what the stack's Redis prints as its version. With `is_replacing`, what the volumes hold is removed when
    all files of the archive are there and have their digests.
    """
    with one_at_a_time(volumes):
        full = [name for name in NAMES if any(files_in(volumes / name))]
        if full and not is_replacing:
            text = (
                f"the volumes of {' and '.join(full)} hold data already; --replace removes it for what the backup has"
            )
            raise OnbeatError(text)
        if problem := shortage(volumes / "trainer", num_bytes, "the files of the backup"):
            raise OnbeatError(f"{problem}; free disk space")
        for name in NAMES:
            (volumes / name / DRAFT).mkdir()
        try:
            read_archive(source, "the backup", lambda name: volumes / place_of(name))
            check_release(volumes / "redis" / DRAFT, release)
            for name in NAMES:
                swap(volumes / name)
        finally:
            for name in NAMES:
                shutil.rmtree(volumes / name / DRAFT, ignore_errors=True)


def place_of(name: PurePosixPath) -> Path:
    """Return the path of a file of a data folder, in the volumes.

    >>> [str(place_of(PurePosixPath(name))) for name in ("redis/a", "jobs/job-1/b", "datasets/c")]
    ['redis/.restoring/a', 'trainer/.restoring/jobs/job-1/b', 'broker/.restoring/datasets/c']
    """
    if name.parts[0] == REDIS_FOLDER:
        return Path("redis", DRAFT, *name.parts[1:])
    return Path("trainer" if name.parts[0] == JOBS else "broker", DRAFT, *name.parts)


def check_release(folder: Path, printed: str) -> None:
    """Raise OnbeatError if the stack's Redis cannot read the data. Its record is for a local stack alone: remove it."""
    data, release = release_of_data(folder), parse_release(printed)
    if release is None:
        raise OnbeatError(f"the image of Redis prints no version that is known: {printed!r}")
    if data is not None and not release.can_read(data):
        raise OnbeatError(f"the backup has data of {data}, which {release} cannot read; set ONBEAT_REDIS_IMAGE to it")
    (folder / RECORD).unlink(missing_ok=True)


def swap(volume: Path) -> None:
    """Let the files of the draft take the place of all others in the volume."""
    for path in volume.iterdir():
        if path.name != DRAFT:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in (volume / DRAFT).iterdir():
        path.rename(volume / path.name)


@contextmanager
def one_at_a_time(volumes: Path) -> Iterator[None]:
    """Hold a lock for the block, and remove what killed programs have left. Raise OnbeatError if another has the
    lock."""
    folder = os.open(volumes / "trainer", os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OnbeatError("another backup or restore of this stack is running; wait for its end") from error
        for name in NAMES:
            for path in [*(volumes / name).glob(f"{DRAFTS}*"), volumes / name / DRAFT]:
                shutil.rmtree(path, ignore_errors=True)
        yield
    finally:
        os.close(folder)


@contextmanager
def data_folder(volumes: Path) -> Iterator[Path]:
    """Yield a folder of links, which looks like the data folder of a local stack.

    Raise OnbeatError if the broker's volume has a name that is left out there, or is another volume's.
    """
    with TemporaryDirectory(prefix="onbeat-storage-") as name:
        folder = Path(name)
        (folder / REDIS_FOLDER).symlink_to(volumes / "redis")
        (folder / JOBS).symlink_to(volumes / "trainer" / JOBS)
        for path in (volumes / "broker").iterdir():
            if path.name in {*LEFT_OUT, JOBS}:
                raise OnbeatError(f"the broker's volume has {path.name!r}, a name that a backup cannot have; rename it")
            (folder / path.name).symlink_to(path)
        yield folder


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # drafts are removed on the way out
    url = f"redis://admin:{quote(os.environ.get(PASSWORD, ''), safe='')}@redis:6379/0"
    try:
        match arguments:
            case ["backup"]:
                with connect_to(url) as redis:
                    backup(VOLUMES, redis, sys.stdout.buffer)
            case ["restore", num_bytes, release, *flags]:
                restore(VOLUMES, sys.stdin.buffer, int(num_bytes), release, flags == ["--replace"])
            case ["settle", num_jobs]:
                with connect_to(url) as redis, data_folder(VOLUMES) as folder:
                    settle(redis, int(num_jobs), folder, DATA_DIR)
            case _:
                sys.exit(__doc__)
    except (OnbeatError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
