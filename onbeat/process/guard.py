"""`python -m onbeat.process.guard PARENT GRACE_S COMMAND ...`: no process of a command outlives the parent of this one.

    parent (onbeat run) --> guard --> service --> engine process, scoring processes, ...

- the parent dies, even by SIGKILL: the guard notices within a second and stops the service
- SIGTERM: only the service gets it and may drain; after `GRACE_S`, or at SIGINT, everything is killed
- the service dies: the processes that it leaves are killed, whatever session or process group they moved to, and their
  shared memory is removed
- the guard itself is killed: the kernel kills the service, and the parent kills the process group
"""

import contextlib
import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from onbeat.process.confine import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)  # blocked, and taken one by one while the guard waits
KILLED = 128 + signal.SIGKILL
SEGMENT = "/dev/shm/psm_"  # the paths of multiprocessing.shared_memory begin with this
ORPHAN_GRACE_S = 5.0  # all services stop at once, and none waits for a drained queue


def main(parent: int, grace_s: float, command: list[str]) -> int:
    """Run the command under guard, for the process that is named as parent. Return its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, as it may be inherited, it would hide how children end
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # the processes that a dying service leaves become our children
    child = subprocess.Popen(command, preexec_fn=become_service)
    exit_code = supervise(child.pid, parent, grace_s)
    kill_descendants()
    if os.getppid() != parent:
        os.killpg(0, signal.SIGKILL)  # no other process will, and none reads our exit code
    return exit_code


def become_service() -> None:
    die_with_parent()
    for number in HEARD:
        signal.signal(number, signal.SIG_DFL)  # also where this was started with an ignored SIGINT
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)


def supervise(child: int, parent: int, grace_s: float) -> int:
    """Wait until the child is gone or has to go; return its exit code as a shell would give it."""
    deadline, heard = math.inf, None
    while (exit_code := reap(child)) is None:
        is_orphan = os.getppid() != parent
        limit_s = min(grace_s, ORPHAN_GRACE_S) if is_orphan else grace_s if heard == signal.SIGTERM else math.inf
        if deadline == math.inf and limit_s < math.inf:
            os.kill(child, signal.SIGTERM)
        deadline = min(deadline, time.monotonic() + limit_s)
        if heard == signal.SIGINT or time.monotonic() >= deadline:
            return KILLED
        received = signal.sigtimedwait(HEARD, min(1.0, max(0.0, deadline - time.monotonic())))
        heard = received.si_signo if received is not None else None
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
    """Kill children until there are none; as their subreaper we then inherit theirs."""
    deadline = time.monotonic() + deadline_s
    segments: set[Path] = set()
    while time.monotonic() < deadline:
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
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # the process has just ended
        return set()
    paths = [line.partition(SEGMENT)[2] for line in maps if SEGMENT in line]
    return {Path(SEGMENT + name) for name in paths if not name.endswith(" (deleted)")}


def children_of(parent: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state_and_parent = stat.read_text("utf-8", errors="replace").rpartition(")")[2].split()
            if int(state_and_parent[1]) == parent:
                children.append(int(stat.parent.name))
    return children


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
