"""Limits that a process sets on itself, for good; what it starts inherits them.

As a script it becomes another program: `python -I confine.py '{"parent": 12, "memory_mb": 512}' COMMAND ...`. It needs
nothing but Python. Not every kernel and container offers every limit: `enter_process_space`, `confine_files`
and `filter_calls` return whether they worked.
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

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_SECUREBITS, PR_SET_NO_NEW_PRIVS = 1, 22, 28, 38
CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID = 0x08000000, 0x10000000, 0x20000000
NO_ROOT, NO_ROOT_LOCKED = 1, 2  # linux/securebits.h

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
NUMBER, ARCHITECTURE, SECOND_ARGUMENT, THIRD_ARGUMENT = 0, 4, 24, 32  # where they stand in the data that it reads
ALLOW: Instruction = (RETURN, 0, 0, 0x7FFF0000)
REFUSE: Instruction = (RETURN, 0, 0, 0x00050000 | errno.EPERM)
UNKNOWN: Instruction = (RETURN, 0, 0, 0x00050000 | errno.ENOSYS)  # programs then do without, as on an older kernel

# System calls by machine. Those from 424 have the same number everywhere. Newer ones than Linux 6.17 has, and the
# second table of x86-64, are unknown, so that a new way to do what is refused here stays closed.
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FIRST_UNKNOWN = 470
OPENAT2 = 437  # the flags of this call are in memory, which a filter cannot read
JUDGED_CALLS = {  # socketpair, ioctl, fcntl, open (Arm has none), openat: their arguments decide
    "x86_64": (53, 16, 72, 2, 257),
    "aarch64": (199, 29, 25, FIRST_UNKNOWN, 56),
}
REFUSED_CALLS = {
    "x86_64": (
        *(41, 42, 49, 50),  # socket, connect, bind, listen
        *(90, 91, 268),  # chmod, fchmod, fchmodat: Landlock does not see what changes no content of a file
        *(92, 93, 94, 260),  # chown, fchown, lchown, fchownat
        *(132, 235, 261, 280),  # utime, utimes, futimesat, utimensat
        *(188, 189, 190, 197, 198, 199),  # setxattr, removexattr, and their forms for links and open files
        *(73, 76),  # flock; truncate, which Landlock sees from Linux 6.2 only
        *(29, 30, 31, 67),  # shmget, shmat, shmctl, shmdt: these and the next stay when the program has ended
        *(64, 65, 66, 220),  # semget, semop, semctl, semtimedop
        *(68, 69, 70, 71),  # msgget, msgsnd, msgrcv, msgctl
        *(240, 241),  # mq_open, mq_unlink
        *(248, 249, 250),  # add_key, request_key, keyctl
        319,  # memfd_create: RLIMIT_AS does not count its memory
    ),
    "aarch64": (
        *(198, 203, 200, 201),  # socket, connect, bind, listen
        *(52, 53),  # fchmod, fchmodat
        *(54, 55),  # fchownat, fchown
        88,  # utimensat
        *(5, 6, 7, 14, 15, 16),  # setxattr, removexattr, and their forms
        *(32, 45),  # flock, truncate
        *(194, 195, 196, 197),  # shmget, shmctl, shmat, shmdt
        *(190, 191, 192, 193),  # semget, semctl, semtimedop, semop
        *(186, 187, 188, 189),  # msgget, msgctl, msgrcv, msgsnd
        *(180, 181),  # mq_open, mq_unlink
        *(217, 218, 219),  # add_key, request_key, keyctl
        279,  # memfd_create
    ),
}
REFUSED_EVERYWHERE = (
    425,  # io_uring_setup: opens sockets, and changes attributes, by other means
    447,  # memfd_secret
    *(452, 463, 466, 469),  # fchmodat2, setxattrat, removexattrat, file_setattr
)
SOCK_TYPE_MASK, SOCK_STREAM = 0xF, 1
IOCTL_KIND_MASK, TERMINAL = 0xFFFFFF00, 0x5400  # the kind of isatty and set_blocking; others change flags of files
F_SETLEASE = 1024  # makes others wait who open the file


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
    """Go on in a space of its own for processes and System V memory, all of which ends with this program. Return
    whether it worked: many containers do not permit it."""
    if sys.platform != "linux" or ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWIPC) != 0:
        return False
    child = os.fork()  # the first process of the new space
    if child == 0:
        die_with_parent()
        return True
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def give_up_root() -> None:
    """Take what root may do from the program that this process becomes. Others had nothing to give up."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_SECUREBITS, NO_ROOT | NO_ROOT_LOCKED, 0, 0, 0)


def when(operation: int, value: int, then: Instruction) -> list[Instruction]:
    """Return instructions that run `then` if the comparison of what was loaded holds, and skip it otherwise."""
    return [(operation, 0, 1, value), then]


def unless(operation: int, value: int, then: Instruction) -> list[Instruction]:
    return [(operation, 1, 0, value), then]


def judge(call: int, argument: int, mask: int, *rules: Instruction) -> list[Instruction]:
    """Return instructions that decide on a call by the bits of one of its arguments: if no rule refuses it, it is
    allowed."""
    block = [(LOAD, 0, 0, argument), (AND, 0, 0, mask), *rules, ALLOW]
    return [(IS_EQUAL, 0, len(block), call), *block]


def call_filter(machine: str) -> list[Instruction]:
    """Return the filter for a machine.

    It refuses what reaches outside the program and Landlock does not see: sockets but connected pairs such as asyncio
    uses itself, changes of mode, owner, times and attributes of files, locks, and memory that outlives the program. It
    cannot tell files apart, so it refuses these for the program's own files as well.
    """
    socketpair, ioctl, fcntl, open_, openat = JUDGED_CALLS[machine]
    all_bits, opening = 0xFFFFFFFF, os.O_ACCMODE | os.O_TRUNC
    # Before Linux 6.2 Landlock lets a file be emptied that is not opened for writing.
    emptying = [step for mode in (os.O_RDONLY, os.O_ACCMODE) for step in when(IS_EQUAL, mode | os.O_TRUNC, REFUSE)]
    return [
        (LOAD, 0, 0, ARCHITECTURE),
        *unless(IS_EQUAL, ARCHITECTURES[machine], REFUSE),
        (LOAD, 0, 0, NUMBER),
        *when(IS_AT_LEAST, FIRST_UNKNOWN, UNKNOWN),
        *when(IS_EQUAL, OPENAT2, UNKNOWN),
        *judge(socketpair, SECOND_ARGUMENT, SOCK_TYPE_MASK, *unless(IS_EQUAL, SOCK_STREAM, REFUSE)),
        *judge(ioctl, SECOND_ARGUMENT, IOCTL_KIND_MASK, *unless(IS_EQUAL, TERMINAL, REFUSE)),
        *judge(fcntl, SECOND_ARGUMENT, all_bits, *when(IS_EQUAL, F_SETLEASE, REFUSE)),
        *judge(open_, SECOND_ARGUMENT, opening, *emptying),
        *judge(openat, THIRD_ARGUMENT, opening, *emptying),
        *(step for call in (*REFUSED_CALLS[machine], *REFUSED_EVERYWHERE) for step in when(IS_EQUAL, call, REFUSE)),
        ALLOW,
    ]


def filter_calls() -> bool:
    """Refuse system calls by `call_filter`. Return whether the kernel does it. It needs no privilege, so containers
    permit it."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return False
    program = call_filter(platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = struct.pack("HP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    is_filtered: bool = libc.prctl(PR_SET_SECCOMP, FILTER_MODE, header, 0, 0) == 0
    return is_filtered


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
        give_up_root()
    kinds = {"memory_mb": resource.RLIMIT_AS, "file_mb": resource.RLIMIT_FSIZE}
    lower_limits({kind: wishes[name] * MEBIBYTE for name, kind in kinds.items() if name in wishes})
    lower_limits({resource.RLIMIT_CORE: 0})
    if "cpu_s" in wishes:
        lower_limit(resource.RLIMIT_CPU, wishes["cpu_s"], wishes["cpu_s"])
    if "folder" in wishes:
        os.chdir(wishes["folder"])
        confine_files(wishes["readable"], [wishes["folder"]])
        filter_calls()
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
