"""Private temporary folders that are gone when their owner is, however it ended.

    TMPDIR/onbeat-k3v9x2_a/     locked (flock) by the owner and whoever inherits `lock_fd`; free: they are all dead
      .private                  only folders that have it are ever removed here

The owner removes its folder. One that was killed cannot, so whoever makes the next folder of the same prefix removes
those whose lock is free: the kernel frees it, whatever ended its holders. systemd-tmpfiles spares what is locked, too.
"""

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = ".private"


class PrivateFolder:
    """`path` is there, for this user alone, until `remove`. Raises OSError where none can be made."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """`parent`: where it is made, and where dead ones of the prefix are removed; default: the system's place."""
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        remove_dead(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self.lock_fd = os.open(self.path, os.O_RDONLY)  # to be inherited by those who may outlive this process
        self._is_open = True
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
            (self.path / MARK).touch()
        except OSError:  # a full disk, or a file system without locks
            self.leave()
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """With everything inside; what cannot be removed now stays for the next sweep. Safe to call twice."""
        if self._is_open:
            with suppress(OSError):
                remove_folder(self.path)
            self.leave()

    def leave(self) -> None:
        """What is inside stays until the next folder of the prefix is made."""
        if self._is_open:
            os.close(self.lock_fd)
            self._is_open = False


@contextmanager
def private_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    folder = PrivateFolder(prefix, parent)
    try:
        yield folder.path
    finally:
        folder.remove()


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Inside, `tempfile` and child processes make temporary files there."""
    before, cached = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = cached
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def remove_dead(prefix: str, parent: Path) -> None:
    """Folders of this prefix whose lock is free, if they are this user's and have the mark."""
    name = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}")  # as mkdtemp makes them
    for path in parent.glob(f"{prefix}*"):
        if name.fullmatch(path.name) and not path.is_symlink():
            with suppress(OSError):  # another user's, or somebody else removes it just now
                remove_if_dead(path)


def remove_if_dead(path: Path) -> None:
    if not (path / MARK).is_file() or path.stat().st_uid != os.getuid():
        return
    lock_fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner lives
        remove_folder(path)
    finally:
        os.close(lock_fd)


def remove_folder(folder: Path) -> None:
    """The mark goes last: without it nobody would find what is left when this is interrupted."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != MARK:
            path.unlink(missing_ok=True)
    if os.listdir(folder) == [MARK]:
        (folder / MARK).unlink()
        folder.rmdir()
