"""The limits of a scoring process, all in one place. docs/rewards.md says what they do and do not contain.

The process sets them on itself before it imports the reward; processes that the reward starts inherit them.
"""

import contextlib
import math
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

MEBIBYTE = 1 << 20

LOAD_S = 120.0  # start of Python and import of the reward: not counted as scoring
RESPONSES_PER_LIFE = 20  # responses that use up all their time: after their CPU time a process is replaced
MAX_FILE_BYTES = 256 * MEBIBYTE  # size of one file
MAX_OPEN_FILES = 256
NICENESS = 5  # the engine goes first
MOST_EXPENDABLE = "1000"  # the kernel's out-of-memory killer takes this process rather than the engine
MAX_ANSWER_BYTES = MEBIBYTE  # size of a line of a scoring process, or of a service's answer
MAX_MESSAGE = 500  # characters of an error message, which rewards and services write
MAX_OUTPUT_BYTES = 4 * MEBIBYTE  # bytes printed while scoring one response; the parent kills a process that prints more


@dataclass(frozen=True)
class Limits:
    """The limits of one process. `timeout_s` is for one response: by the parent's clock, and CPU time plus a second."""

    timeout_s: float
    memory_mb: int

    @property
    def response_cpu_s(self) -> float:
        return self.timeout_s + 1.0

    @property
    def life_cpu_s(self) -> float:
        return LOAD_S + RESPONSES_PER_LIFE * self.response_cpu_s

    def to_arguments(self) -> list[str]:
        return [str(self.timeout_s), str(self.memory_mb)]

    @classmethod
    def from_arguments(cls, timeout_s: str, memory_mb: str) -> "Limits":
        return cls(float(timeout_s), int(memory_mb))


def restrict_this_process(limits: Limits) -> None:
    """Set all limits for good, but for CPU time, which is granted bit by bit (see CpuBudget)."""
    memory_bytes = limits.memory_mb * MEBIBYTE
    for kind, most in {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
    }.items():
        lower_limit(kind, most, most)
    os.nice(NICENESS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # /proc may be read-only: then the kernel chooses by size
            Path("/proc/self/oom_score_adj").write_text(MOST_EXPENDABLE)


class CpuBudget:
    """The CPU time of this process. The kernel counts it from the process's start, but a process scores many responses:
    so the soft limit moves on with each of them, and the hard limit, which cannot be raised again, ends its life.

    At the soft limit the kernel sends SIGXCPU, which kills; a process that ignores it is killed at the hard limit.
    """

    def __init__(self, limits: Limits) -> None:
        self._response_s = limits.response_cpu_s
        self._life_s = math.ceil(limits.life_cpu_s)

    @property
    def is_worn(self) -> bool:
        """The CPU time that is left may not suffice for one more response."""
        return time.process_time() + self._response_s > self._life_s

    def grant(self, seconds: float) -> None:
        lower_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds), self._life_s)


def lower_limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit. A hard limit that was set before may only get lower."""
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
        hard = min(hard, ceiling)
    resource.setrlimit(kind, (min(soft, hard), hard))
