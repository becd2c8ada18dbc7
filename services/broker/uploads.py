"""The data files that users have uploaded: complete or not there at all, and never changed.

DATA_DIR/datasets/NAME            the file
DATA_DIR/datasets/.NAME.sha256    its digest, size and time of change
DATA_DIR/datasets/.upload-*       files that are being received
"""

import asyncio
import contextlib
import hashlib
import os
import re
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO

from starlette.exceptions import HTTPException

from onbeat.contracts.records import DATASETS_FOLDER, DatasetRecord
from onbeat.machine.disk_space import GB, free_bytes

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
UPLOADING = ".upload-"
LEFTOVER_S = 86_400.0  # an upload that is older has lost its broker
MIN_FREE_BYTES = GB  # bytes left free on the disk, which Redis may share
CHECK_BYTES = 64 << 20  # the free disk space is checked so often


class Uploads:
    """The uploaded files below a data folder. `max_bytes`: requests with more are refused before they come here."""

    def __init__(self, data_dir: Path, max_bytes: int) -> None:
        self._folder, self.max_bytes = data_dir / DATASETS_FOLDER, max_bytes

    def list(self) -> list[DatasetRecord]:
        """Return all files, the newest first."""
        if not self._folder.is_dir():
            return []
        records = [
            self._record(path) for path in self._folder.iterdir() if NAME.fullmatch(path.name) and path.is_file()
        ]
        return sorted(records, key=lambda record: -record.uploaded_at)

    async def receive(self, name: str, chunks: AsyncIterator[bytes], sha256: str | None) -> tuple[DatasetRecord, bool]:
        """Store a file; also return whether it is new. `sha256`: what its digest must be, where the sender knows it.

        Raises HTTPException, also where another file has the name.
        """
        try:
            with self._draft() as draft:
                digest = await receive_into(draft, chunks)
                if sha256 not in (None, digest):
                    message = f"what arrived has the SHA-256 {digest}, not {sha256}; the file changed, send it again"
                    raise HTTPException(422, message)
                return await asyncio.to_thread(self._publish, draft, name, digest)
        except OSError as error:
            message = f"the broker cannot write to its data folder: {error.strerror or error}; ask whoever runs it"
            raise HTTPException(507, message) from error

    def remove(self, name: str) -> bool:
        """Remove a file. Return False where there is none."""
        try:
            (self._folder / name).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            message = f"the broker cannot remove it: {error.strerror or error}; ask whoever runs it"
            raise HTTPException(507, message) from error
        self._note(name).unlink(missing_ok=True)
        return True

    @contextlib.contextmanager
    def _draft(self) -> Iterator[IO[bytes]]:
        """Yield a new file, which is gone afterwards; what was published of it stays under another name."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob(f"{UPLOADING}*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - LEFTOVER_S:
                    path.unlink()
        with tempfile.NamedTemporaryFile(prefix=UPLOADING, dir=self._folder) as file:
            yield file

    def _publish(self, draft: IO[bytes], name: str, digest: str) -> tuple[DatasetRecord, bool]:
        draft.flush()
        os.fchmod(draft.fileno(), 0o644)
        os.fsync(draft.fileno())
        target = self._folder / name
        try:
            os.link(draft.name, target)  # unlike a rename, this never replaces a file that a job may be reading
        except FileExistsError as error:
            if self._digest(target) != digest:
                message = f"there is another file {name}, and files are never changed; take another name"
                raise HTTPException(409, message) from error
            return self._record(target), False
        self._write_note(target, digest)
        return self._record(target), True

    def _record(self, path: Path) -> DatasetRecord:
        status = path.stat()
        return DatasetRecord(
            name=path.name,
            path=f"{DATASETS_FOLDER}/{path.name}",
            num_bytes=status.st_size,
            sha256=self._noted_digest(path),
            uploaded_at=status.st_mtime,
        )

    def _digest(self, path: Path) -> str:
        """Return the file's digest. One that came in another way than by an upload has no note yet."""
        noted = self._noted_digest(path)
        if noted is not None:
            return noted
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._write_note(path, digest)
        return digest

    def _noted_digest(self, path: Path) -> str | None:
        try:
            digest, *state = self._note(path.name).read_text("utf-8").split()
        except (OSError, ValueError):
            return None
        return digest if state == state_of(path) else None

    def _write_note(self, path: Path, digest: str) -> None:
        with contextlib.suppress(OSError):  # a missing file only costs that the digest is computed again
            self._note(path.name).write_text(" ".join([digest, *state_of(path)]), "utf-8")

    def _note(self, name: str) -> Path:
        return self._folder / f".{name}.sha256"


async def receive_into(draft: IO[bytes], chunks: AsyncIterator[bytes]) -> str:
    """Write the chunks, and return their SHA-256. Raises HTTPException when the disk is nearly full."""
    digest, num_bytes, next_check = hashlib.sha256(), 0, 0
    async for chunk in chunks:
        if num_bytes >= next_check:
            if free_bytes(Path(draft.name).parent) < MIN_FREE_BYTES:
                message = f"the broker's disk has less than {MIN_FREE_BYTES / GB:g} GB free; free some space there"
                raise HTTPException(507, message)
            next_check = num_bytes + CHECK_BYTES
        await asyncio.to_thread(draft.write, chunk)
        digest.update(chunk)
        num_bytes += len(chunk)
    return digest.hexdigest()


def state_of(path: Path) -> list[str]:
    status = path.stat()
    return [str(status.st_size), str(status.st_mtime_ns)]
