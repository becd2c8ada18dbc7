"""The limits of a scoring process, besides those of all child processes. docs/rewards.md says what they contain.

The process sets them on itself before it imports the reward; processes that the reward starts inherit them.
"""

import math
import resource
import time
from dataclasses import dataclass

from onbeat.confine import lower_limit
from services.rollout.children.limits import LOAD_S

RESPONSES_PER_LIFE = 20  # responses that use up all their time: after their CPU time a process is replaced
MAX_OPEN_FILES = 256


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
