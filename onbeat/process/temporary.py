"""Private temporary folders that are removed when their owner is gone, however it ended.

    TMPDIR/onbeat-k3v9x2_a/     locked (flock) by the owner and by the processes that inherit `lock_fd`
      .private                  marks the folder as one that may be removed

The owner removes its folder. A killed owner cannot, so the process that makes the next folder of the same prefix
removes those whose lock is free: the kernel frees a lock when all of its holders are dead, however they ended.
systemd-tmpfiles spares locked folders, too.
"""

import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = ".private"


class PrivateFolder:
    """A folder at `path` for this user alone. Its owner calls `remove` or `leave` once. Making it may raise OSError."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        """Make the folder in `parent` (default: the system's place), and remove dead ones of the prefix there."""
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        parent.mkdir(parents=True, exist_ok=True)
        remove_dead(prefix, parent)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self.lock_fd = os.open(self.path, os.O_RDONLY)  # inherited by processes that may outlive this one
        try:
            fcntl.flock(self.lock_fd, fcntl.LOCK_EX)
            (self.path / MARK).touch()
        except OSError:  # a full disk, or a file system without locks
            self.leave()
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def remove(self) -> None:
        """Remove the folder with its content; the next sweep removes what cannot be removed now."""
        with suppress(OSError):
            remove_folder(self.path)
        self.leave()

    def leave(self) -> None:
        """Release the lock; the content stays until the next folder of the prefix is made."""
        os.close(self.lock_fd)


@contextmanager
def private_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    folder = PrivateFolder(prefix, parent)
    try:
        yield folder.path
    finally:
        folder.remove()


def remove_dead(prefix: str, parent: Path) -> None:
    """Remove folders of this prefix whose lock is free, if they are this user's and have the mark."""
    name = re.compile(re.escape(prefix) + r"[a-z0-9_]{8}")  # as mkdtemp makes them
    for path in parent.glob(f"{prefix}*"):
        if name.fullmatch(path.name) and not path.is_symlink():
            with suppress(OSError):  # another user's, or another process is just removing it
                remove_if_dead(path)


def remove_if_dead(path: Path) -> None:
    if not (path / MARK).is_file() or path.stat().st_uid != os.getuid():
        return
    lock_fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its owner is alive
        remove_folder(path)
    finally:
        os.close(lock_fd)


def remove_folder(folder: Path) -> None:
    """Remove a folder, its mark last: without it no sweep would find the rest of an interrupted removal.

    The system's programs do it: Python's own functions recurse, and fail when folders lie too deep.
    """
    content = [path for path in folder.iterdir() if path.name != MARK]
    files = [path for path in content if not path.is_symlink()]  # chmod would follow it
    for command, paths in ((["chmod", "-R", "u+rwX"], files), (["rm", "-rf"], content)):
        if paths:
            subprocess.run([*command, "--", *paths], check=False, stderr=subprocess.DEVNULL)
    if os.listdir(folder) == [MARK]:
        (folder / MARK).unlink()
        folder.rmdir()
