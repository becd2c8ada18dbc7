"""`python -m onbeat.local.guard`: run one command so that none of its processes outlives the parent of this process.

    parent (onbeat run) --> guard --> service --> engine process, scoring processes, ...

- the parent dies, even by SIGKILL: the guard notices within a second and stops the service
- SIGTERM: only the service gets it and may drain; after `--grace-s`, or at SIGINT, everything is killed
- the service dies: the processes that it leaves are killed, whatever session or process group they moved to, and their
  shared memory is removed
- the guard itself is killed: the kernel kills the service (Linux), and the parent kills the process group
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from onbeat.confine import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
IS_LINUX = sys.platform == "linux"
SEGMENT = "/dev/shm/psm_"  # the paths of multiprocessing.shared_memory begin with this
ORPHAN_GRACE_S = 5.0  # all services stop at once, and none waits for a drained queue


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="process id of whoever starts this")
    parser.add_argument("--grace-s", type=float, required=True, help="time between SIGTERM and SIGKILL")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    stop = StopSignal()
    if IS_LINUX:  # the processes that a dying service leaves become our children
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    child = subprocess.Popen(command, preexec_fn=die_with_parent)
    exit_code = supervise(child.pid, options.parent, options.grace_s, stop)
    kill_descendants()
    if os.getppid() != options.parent:
        os.killpg(0, signal.SIGKILL)  # no other process will, and none reads our exit code
    return exit_code


class StopSignal:
    """Two flags: SIGTERM sets `is_set`, SIGINT `is_urgent`; they and SIGCHLD end a wait early."""

    def __init__(self) -> None:
        self.is_set = self.is_urgent = False
        self._reader, writer = socket.socketpair()
        self._reader.setblocking(False)
        writer.setblocking(False)
        self._writer = writer
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._set)
        signal.signal(signal.SIGINT, self._hurry)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _set(self, *_: object) -> None:
        self.is_set = True

    def _hurry(self, *_: object) -> None:
        self.is_urgent = True

    def wait(self, timeout_s: float) -> None:
        if select.select([self._reader], [], [], timeout_s)[0]:
            self._reader.recv(4096)


def supervise(child: int, parent: int, grace_s: float, stop: StopSignal) -> int:
    """Wait until the child is gone or has to go; return its exit code as a shell would give it."""
    deadline: float | None = None
    while (exit_code := reap(child)) is None:
        is_orphan = os.getppid() != parent
        if deadline is None and (stop.is_set or is_orphan):
            deadline = time.monotonic() + (min(grace_s, ORPHAN_GRACE_S) if is_orphan else grace_s)
            os.kill(child, signal.SIGTERM)
        if stop.is_urgent or (deadline is not None and time.monotonic() >= deadline):
            return 128 + signal.SIGKILL
        stop.wait(1.0 if deadline is None else min(1.0, max(0.0, deadline - time.monotonic())))
    return exit_code


def reap(child: int) -> int | None:
    """Collect every child that has exited; return the service's exit code once it is among them."""
    exit_code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                exit_code = code if code >= 0 else 128 - code
    return exit_code


def kill_descendants(deadline_s: float = 5.0) -> None:
    """Kill children until there are none; as their subreaper we then inherit theirs. Linux only."""
    deadline = time.monotonic() + deadline_s
    segments: set[Path] = set()
    while IS_LINUX and time.monotonic() < deadline:
        for pid in children_of(os.getpid()):
            segments |= shared_memory_of(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.01)
        except ChildProcessError:
            break
    for segment in segments:
        segment.unlink(missing_ok=True)


def shared_memory_of(pid: int) -> set[Path]:
    """Return the named shared-memory segments that the process has mapped, such as an engine's queues.

    Python's own process that would remove them is killed, too.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:  # the process has just ended
        return set()
    paths = [line.partition(SEGMENT)[2] for line in maps if SEGMENT in line]
    return {Path(SEGMENT + name) for name in paths if not name.endswith(" (deleted)")}


def children_of(parent: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state_and_parent = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(state_and_parent[1]) == parent:
                children.append(int(stat.parent.name))
    return children


if __name__ == "__main__":
    sys.exit(main())
