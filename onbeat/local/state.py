"""The data folder of a running stack: how it is made and locked. `onbeat.process.stacks` reads its state."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import IO

from onbeat.contracts.data_folder import STATE_DRAFT
from onbeat.contracts.errors import OnbeatError
from onbeat.process.stacks import (
    CHILDREN_LOCK,
    OWNER_LOCK,
    StackState,
    not_writable,
    open_lock,
    state_path,
    try_lock,
    wait_until,
)

OWNER_DEADLINE_S, LEFTOVERS_DEADLINE_S = 1.0, 15.0


def create_data_dir(data_dir: Path) -> None:
    """Create the folder, its logs and its .gitignore. Raise OnbeatError when that is impossible."""
    try:
        (data_dir / "logs").mkdir(parents=True, exist_ok=True)
        if not (data_dir / ".gitignore").exists():
            (data_dir / ".gitignore").write_text("*\n", "utf-8")
    except OSError as error:
        raise not_writable(data_dir, error) from error


class StackLock:
    """The lock of a running stack on its data folder. Making it raises OnbeatError when another stack runs there."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._owner = take_lock(data_dir / OWNER_LOCK, OWNER_DEADLINE_S)  # another process may just be looking
        state_path(data_dir).unlink(missing_ok=True)  # it belongs to an owner that was killed
        try:
            # The children of an owner that was killed are on their way out, and Redis may still be writing.
            self._children = take_lock(data_dir / CHILDREN_LOCK, LEFTOVERS_DEADLINE_S)
        except OnbeatError:
            self._owner.close()
            raise

    @property
    def children_fd(self) -> int:
        """The file descriptor that the guards inherit."""
        return self._children.fileno()

    def write(self, state: StackState) -> None:
        path = state_path(self._data_dir)
        draft = self._data_dir / STATE_DRAFT
        draft.touch(mode=0o600)
        draft.write_text(json.dumps(asdict(state)), "utf-8")
        draft.replace(path)

    def release(self) -> None:
        state_path(self._data_dir).unlink(missing_ok=True)
        self._children.close()
        self._owner.close()


def take_lock(path: Path, deadline_s: float) -> IO[str]:
    file = open_lock(path)
    if not wait_until(lambda: try_lock(file), deadline_s):
        file.close()
        if path.name == CHILDREN_LOCK:
            raise OnbeatError(f"services of a killed stack in {path.parent} are still ending; try again in a minute")
        remedy = "stop it with `onbeat down` or choose another folder with --data-dir"
        raise OnbeatError(f"a stack is already running in {path.parent}; {remedy}")
    return file
