"""The file of `onbeat backup`: a tar of a header, the files and their digests, the same for a local stack and compose.

backup.json                   format, version of Onbeat, the jobs
redis/...                     the ledger: a snapshot of Redis as the base of an append-only file
jobs/... datasets/... ...     the other files of the data folder, without logs, caches and unfinished checkpoints
digests.json                  the SHA-256 of each file before it; without it the file is cut off
"""

import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

from onbeat.contracts.errors import OnbeatError
from onbeat.local.resting import RecordedJob

FORMAT = 1
HEADER, DIGESTS = "backup.json", "digests.json"
CHUNK_BYTES = 1 << 20
MAX_TEXT_BYTES = 1 << 28  # largest header, and largest list of digests

Place = Callable[[PurePosixPath], Path]  # the file that a name in the archive becomes


# ---- writing -----------------------------------------------------------------------------------------------------


@contextmanager
def new_file(file: Path) -> Iterator[IO[bytes]]:
    """Yield a file beside `file`, which gets its name when the block has ended and all of it is on disk.

    Raise OnbeatError if there is such a file already, and for what goes wrong with the disk.
    """
    if file.exists():
        raise OnbeatError(f"{file} exists already; give another name, a backup overwrites nothing")
    partial = file.with_name(f"{file.name}.partial")
    try:
        with open(partial, "xb", opener=partial_opener) as output:
            yield output
            output.flush()
            os.fsync(output.fileno())
        partial.rename(file)
    except FileExistsError as error:
        raise OnbeatError(f"{partial} exists: another backup is writing it, or was killed; remove it") from error
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OnbeatError(f"the backup {file} cannot be written: {error}") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_opener(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # prompts are in it


def write_archive(output: IO[bytes], jobs: Sequence[RecordedJob], files: Mapping[str, Path]) -> None:
    """Write header, files and digests, one after the other: no file is held in memory."""
    from onbeat import __version__

    states = [{"id": job.id, "name": job.name, "state": job.state.value} for job in jobs]
    header = {"format": FORMAT, "onbeat": __version__, "jobs": states}
    digests: dict[str, str] = {}
    with tarfile.open(fileobj=output, mode="w|", bufsize=CHUNK_BYTES, format=tarfile.PAX_FORMAT) as archive:
        add_text(archive, HEADER, json.dumps(header, indent=2))
        for name, path in files.items():
            try:
                source = path.open("rb")
            except FileNotFoundError:  # a service has removed it meanwhile
                continue
            with source:
                digests[name] = add_file(archive, name, source)
        add_text(archive, DIGESTS, json.dumps(digests, indent=2))


class DigestingFile:
    """A file whose digest grows with what is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        chunk = self._file.read(size)
        self.digest.update(chunk)
        return chunk


def add_file(archive: tarfile.TarFile, name: str, source: IO[bytes]) -> str:
    """Add an open file with the size that it has now, as it may grow. Return its digest."""
    status = os.fstat(source.fileno())
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = status.st_size, int(status.st_mtime), status.st_mode & 0o777
    reader = DigestingFile(source)
    archive.addfile(entry, reader)
    return reader.digest.hexdigest()


def add_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(time.time())
    archive.addfile(entry, io.BytesIO(content))


# ---- reading -----------------------------------------------------------------------------------------------------


def check_archive(file: Path) -> dict[str, Any]:
    """Compare all digests without writing anything. Return the header. Raise OnbeatError."""
    with open_backup(file) as source:
        return read_archive(source, str(file), None)


@contextmanager
def open_backup(file: Path) -> Iterator[IO[bytes]]:
    """Yield the open file. Raise OnbeatError for what goes wrong with files inside the block."""
    try:
        with file.open("rb") as source:
            yield source
    except OSError as error:
        raise OnbeatError(f"{file} cannot be restored: {error}") from error


def read_archive(source: IO[bytes], title: str, place: Place | None) -> dict[str, Any]:
    """Write the files to their places, if any, and compare their digests. Return the header.

    Raise OnbeatError, which begins with the title, for an archive that is not whole or has other names than a backup.
    """
    try:
        header, expected, digests = read_entries(source, title, place)
    except tarfile.TarError as error:
        raise OnbeatError(f"{title} is no backup of Onbeat, or is damaged: {error}") from error
    if expected is None:
        raise OnbeatError(f"{title} is cut off: it has no {DIGESTS} at its end; take another backup")
    wrong = [name for name in sorted(expected.keys() | digests.keys()) if expected.get(name) != digests.get(name)]
    if wrong:
        raise OnbeatError(f"{title} is damaged: {wrong[0]} is not what was backed up; take another backup")
    return header


def read_entries(
    source: IO[bytes], title: str, place: Place | None
) -> tuple[dict[str, Any], dict[str, str] | None, dict[str, str]]:
    """Return the header, the digests that the archive names (None: it is cut off), and those of what was read."""
    digests: dict[str, str] = {}
    expected: dict[str, str] | None = None
    with tarfile.open(fileobj=source, mode="r|", bufsize=CHUNK_BYTES) as archive:
        entries = iter(archive)
        header = read_header(archive, next(entries, None), title)
        for entry in entries:
            if entry.name == DIGESTS:
                expected = json.loads(read_text(archive, entry))
            else:
                digests[entry.name] = read_file(archive, entry, place)
    return header, expected, digests


def read_header(archive: tarfile.TarFile, entry: tarfile.TarInfo | None, title: str) -> dict[str, Any]:
    """Return the header. Raise OnbeatError if the file is no backup, or one of another format."""
    header: dict[str, Any] = {}
    if entry is not None and entry.name == HEADER:
        with suppress(ValueError):
            header = json.loads(read_text(archive, entry))
    if "format" not in header:
        raise OnbeatError(f"{title} is no backup of Onbeat: it does not begin with {HEADER}")
    if header["format"] != FORMAT:
        made_by = f"Onbeat {header.get('onbeat')} wrote it"
        raise OnbeatError(
            f"{title} has format {header['format']}, this version reads {FORMAT}: {made_by}; restore there"
        )
    return header


def read_text(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> str:
    source = archive.extractfile(entry)
    if source is None or entry.size > MAX_TEXT_BYTES:
        raise OnbeatError(f"{entry.name} of the backup is not what Onbeat writes")
    return source.read().decode()


def read_file(archive: tarfile.TarFile, entry: tarfile.TarInfo, place: Place | None) -> str:
    """Read one file, and write it to its place if there is one. Return the digest of what was read."""
    name, source = PurePosixPath(entry.name), archive.extractfile(entry) if entry.isreg() else None
    if source is None or name.is_absolute() or ".." in name.parts or not name.parts:
        raise OnbeatError(f"the backup has {entry.name!r}, which is no file of a data folder; nothing was restored")
    reader = DigestingFile(source)
    if place is None:
        while reader.read(CHUNK_BYTES):
            pass
    else:
        write_file(reader, place(name), entry.mode & 0o777)
    return reader.digest.hexdigest()


def write_file(source: DigestingFile, target: Path, mode: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("xb") as output:
        while chunk := source.read(CHUNK_BYTES):
            output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    target.chmod(mode)
