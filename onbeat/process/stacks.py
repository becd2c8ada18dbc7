"""The state of a data folder, as commands and clients read it: whether a stack runs there, and where.

    stack.lock     held by the process that runs the stack
    children.lock  held by it and by the guards of its children: free when the last child is gone
    stack.json     where the broker is

The locks are the truth, because the kernel frees them when their holders die; the file is only read under them.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from onbeat.contracts.data_folder import STATE_FILE
from onbeat.contracts.errors import OnbeatError

DEFAULT_DATA_DIR = ".onbeat"
OWNER_LOCK, CHILDREN_LOCK = "stack.lock", "children.lock"
VIEW = "view"  # the command of a stack whose broker only reads


@dataclass(frozen=True)
class StackState:
    pid: int
    command: str  # "run" | "up" | "view": a stack of `run` ends with its job, that of `view` is read-only
    url: str
    redis_url: str
    started_at: float
    machine: str = ""  # where the process ids are valid: see `this_machine`
    host: str = ""  # name of the machine, for people

    @property
    def is_read_only(self) -> bool:
        return self.command == VIEW


def this_machine() -> str:
    """Return what differs between machines, and between containers that share a data folder. Its host may get another
    name."""
    if sys.platform != "linux":
        return ""
    return (
        f"{Path('/proc/sys/kernel/random/boot_id').read_text('utf-8').strip()}, {os.stat('/proc/self/ns/pid').st_ino}"
    )


def resolve_data_dir(data_dir: Path | None) -> Path:
    """Return the option, else ONBEAT_DATA_DIR, else `.onbeat` in the current folder. Raise ValueError for a path that
    is not text: records and messages name what lies in it."""
    path = Path(data_dir or os.environ.get("ONBEAT_DATA_DIR") or DEFAULT_DATA_DIR).expanduser().resolve()
    shown = os.fsencode(path).decode(errors="replace")
    if shown != str(path):
        raise ValueError(f"the data folder {shown} has a name that is not UTF-8; choose another one with --data-dir")
    return path


def running_stack(data_dir: Path) -> StackState | None:
    """Return the stack that runs in the data folder; None if there is none or it is still starting."""
    if not is_locked(data_dir / OWNER_LOCK):
        return None
    try:
        return StackState(**json.loads(state_path(data_dir).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def has_processes(data_dir: Path) -> bool:
    """Return whether a stack is starting, running or ending here, or was killed and has children left."""
    return is_locked(data_dir / OWNER_LOCK) or is_locked(data_dir / CHILDREN_LOCK)


def why_ended(data_dir: Path) -> str:
    """Return why the last stack of `onbeat up` ended by itself; '' if it runs, was stopped, or never ran."""
    path = data_dir / "logs" / "stack.log"
    if has_processes(data_dir) or not path.is_file():
        return ""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:  # another user's
        return ""
    lines = [line for line in lines if " ERROR " in line and not line.startswith(" ")]  # indented: a service's own log
    if not lines:
        return ""
    reason = lines[-1].partition(" ERROR ")[2].partition("; last lines of")[0]
    return f"the stack of {data_dir} has ended: {reason}; {path} has more"


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with open_lock(path) as file:
        return not try_lock(file, fcntl.LOCK_SH)  # shared: two processes that look do not disturb each other


def wait_until(condition: Callable[[], bool], deadline_s: float) -> bool:
    """Wait until the condition holds. Return whether it did in time."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def state_path(data_dir: Path) -> Path:
    return data_dir / STATE_FILE


def open_lock(path: Path) -> IO[str]:
    try:
        return path.open("a+", encoding="utf-8")  # shared locks on network disks need a file that can be read
    except OSError as error:
        raise not_writable(path.parent, error) from error


def try_lock(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # as on network disks
        message = f"{file.name} cannot be locked ({error.strerror}); choose a folder on another disk with --data-dir"
        raise OnbeatError(message) from error
    return True


def not_writable(data_dir: Path, error: OSError) -> OnbeatError:
    return OnbeatError(f"cannot write to the data folder {data_dir}: {error}; choose another with --data-dir")
