"""Limits that a process sets on itself, for good; what it starts inherits them.

As a script it becomes another program: `python -I confine.py '{"parent": 12, "memory_mb": 512}' COMMAND ...`. It needs
nothing but Python. Not every kernel and container offers every limit: `enter_process_space`, `confine_files`
and `forbid_sockets` return whether they worked.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Iterable, Mapping

MEBIBYTE = 1 << 20

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000

# Landlock (linux/landlock.h). Each version of its interface knows more kinds of access than the one before.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
READ = EXECUTE | READ_FILE | READ_DIR
SIGNALS_AND_ABSTRACT_SOCKETS = 3

# Seccomp (linux/seccomp.h): a program of the kernel's packet filter (linux/filter.h) decides on each system call.
FILTER_MODE = 2
LOAD, AND, IS_EQUAL, IS_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
Instruction = tuple[int, int, int, int]  # operation, instructions to skip if true, and if false, operand
NUMBER, ARCHITECTURE, SECOND_ARGUMENT = 0, 4, 24  # where they stand in the data that it reads
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
SOCK_TYPE_MASK, SOCK_STREAM = 0xF, 1
X32 = 0x40000000  # the first number of x86-64's second table of system calls
IO_URING_SETUP = 425  # opens sockets by other means
# By machine: its architecture, and the numbers of socket, connect and socketpair.
SOCKET_CALLS = {"x86_64": (0xC000003E, 41, 42, 53), "aarch64": (0xC00000B7, 198, 203, 199)}


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the parent dies; only Linux can do that. `parent`: end now if it has died."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def lower_limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit. A hard limit that was set before may only get lower."""
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
        hard = min(hard, ceiling)
    resource.setrlimit(kind, (min(soft, hard), hard))


def lower_limits(most: Mapping[int, int]) -> None:
    for kind, value in most.items():
        lower_limit(kind, value, value)


def enter_process_space() -> bool:
    """Go on in a process space of its own, all of which ends with this program. Return whether it worked: many
    containers do not permit it."""
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0:
        return False
    child = os.fork()  # the first process of the new space
    if child == 0:
        die_with_parent()
        return True
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def when(operation: int, value: int, then: Instruction) -> list[Instruction]:
    """Return instructions that run `then` if the comparison of what was loaded holds, and skip it otherwise."""
    return [(operation, 0, 1, value), then]


def unless(operation: int, value: int, then: Instruction) -> list[Instruction]:
    return [(operation, 1, 0, value), then]


def forbid_sockets() -> bool:
    """Refuse every socket, UNIX sockets with a path included, except connected pairs such as asyncio uses itself.
    Return whether the kernel does it. It needs no privilege, so containers permit it."""
    if sys.platform != "linux" or platform.machine() not in SOCKET_CALLS:
        return False
    architecture, socket, connect, socketpair = SOCKET_CALLS[platform.machine()]
    refuse, allow = (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        *unless(IS_EQUAL, architecture, refuse),
        (LOAD, 0, 0, NUMBER),
        *when(IS_AT_LEAST, X32, refuse),
        *when(IS_EQUAL, socket, refuse),
        *when(IS_EQUAL, connect, refuse),
        *when(IS_EQUAL, IO_URING_SETUP, refuse),
        *unless(IS_EQUAL, socketpair, allow),
        (LOAD, 0, 0, SECOND_ARGUMENT),
        (AND, 0, 0, SOCK_TYPE_MASK),
        *unless(IS_EQUAL, SOCK_STREAM, refuse),
        allow,
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = struct.pack("HP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    is_forbidden: bool = libc.prctl(PR_SET_SECCOMP, FILTER_MODE, header, 0, 0) == 0
    return is_forbidden


def landlock_version() -> int:
    """Return the version of the kernel's Landlock interface; less than 1 where there is none."""
    if sys.platform != "linux":
        return 0
    return int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_FLAG))


def confine_files(readable: Iterable[str], writable: Iterable[str]) -> bool:
    """Allow this process only these files and what is below these folders, and no signals to others, by Landlock.

    Return whether the kernel knows how to do it; older ones know a part of it.
    """
    version, libc = landlock_version(), ctypes.CDLL(None)
    if version < 1:
        return False
    everything = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    rules = struct.pack("QQQ", everything, 0, SIGNALS_AND_ABSTRACT_SOCKETS)[
        : 8 + 8 * (version >= 4) + 8 * (version >= 6)
    ]
    ruleset = libc.syscall(CREATE_RULESET, rules, ctypes.c_size_t(len(rules)), 0)
    folders = [(folder, READ) for folder in readable] + [(folder, everything) for folder in writable]
    for path, access in [*folders, ("/dev/null", READ_FILE | WRITE_FILE), ("/dev/urandom", READ_FILE)]:
        with contextlib.suppress(FileNotFoundError):
            place = os.open(path, os.O_PATH)
            if not os.path.isdir(path):
                access &= EXECUTE | READ_FILE | WRITE_FILE  # the kernel refuses the rights of folders on files
            libc.syscall(ADD_RULE, ruleset, PATH_BENEATH, struct.pack("=Qi", access, place), 0)
            os.close(place)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    is_confined: bool = libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
    os.close(ruleset)
    return is_confined


def main(wishes_json: str, *command: str) -> None:
    """Become the command, within the limits that are asked for."""
    wishes = json.loads(wishes_json)
    die_with_parent(wishes["parent"])
    if "folder" in wishes:
        enter_process_space()
    kinds = {"memory_mb": resource.RLIMIT_AS, "file_mb": resource.RLIMIT_FSIZE}
    lower_limits({kind: wishes[name] * MEBIBYTE for name, kind in kinds.items() if name in wishes})
    lower_limits({resource.RLIMIT_CORE: 0})
    if "cpu_s" in wishes:
        lower_limit(resource.RLIMIT_CPU, wishes["cpu_s"], wishes["cpu_s"])
    if "folder" in wishes:
        os.chdir(wishes["folder"])
        confine_files(wishes["readable"], [wishes["folder"]])
        forbid_sockets()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
