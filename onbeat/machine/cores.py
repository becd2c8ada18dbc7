"""The split of CPU cores between rollouts and trainer.

The halves are disjoint, because two thread pools on one core fight. With fewer than four cores both get all of them: a
half would idle while the other stage works alone, which costs more than the fight.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FEW_CORES = 4


@dataclass(frozen=True)
class CorePlan:
    rollouts: list[list[int]]  # one list per replica; replicas share when there are fewer cores than replicas
    trainer: list[int]

    @property
    def is_shared(self) -> bool:
        return any(core in self.trainer for cores in self.rollouts for core in cores)


def available_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def physical_cores(cores: Sequence[int], topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """Return one hardware thread per core: a second computing thread on the same core gains nothing."""
    first: dict[str, int] = {}
    for core in cores:
        try:
            siblings = (topology / f"cpu{core}" / "topology" / "thread_siblings_list").read_text("utf-8")
        except OSError:  # the system does not say: every one counts
            siblings = str(core)
        first.setdefault(siblings, core)
    return list(first.values())


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPUs that a container's limit gives this process, whatever cores it may run on; infinity without."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text("utf-8").split()
        else:
            quota, period = ((cgroup / "cpu" / f"cpu.cfs_{name}_us").read_text("utf-8") for name in ("quota", "period"))
    except OSError:  # there are no control groups here
        return math.inf
    return int(quota) / int(period) if quota.strip() not in ("max", "-1") else math.inf


def plan_cores(
    cores: Sequence[int],
    num_rollouts: int,
    rollout_cores: Sequence[int] | None = None,
    trainer_cores: Sequence[int] | None = None,
    allowed: Sequence[int] | None = None,
    quota: float = math.inf,
) -> CorePlan:
    """Plan the cores: the first half generates, the rest trains. Few cores do both, and so do any with a `quota` of few
    CPUs. Cores from the user are kept, if they are `allowed` (default: `cores`).

    >>> plan_cores([0, 1, 2, 3, 4, 5], num_rollouts=2)
    CorePlan(rollouts=[[0, 1], [2]], trainer=[3, 4, 5])
    """
    if num_rollouts < 1:
        raise ValueError(f"at least one rollout is needed, got {num_rollouts}")
    for core in [*(rollout_cores or []), *(trainer_cores or [])]:
        if core not in (allowed or cores):
            raise ValueError(f"core {core} is not available; this process may use {format_cores(allowed or cores)}")
    if rollout_cores is None and trainer_cores is None and min(len(cores), quota) < FEW_CORES:
        rollout_cores = trainer_cores = list(cores)
    if rollout_cores is None:
        taken = set(trainer_cores or [])
        free = [core for core in cores if core not in taken] or list(cores)
        rollout_cores = free if trainer_cores else free[: max(1, len(cores) // 2)]
    if trainer_cores is None:
        trainer_cores = [core for core in cores if core not in set(rollout_cores)] or list(cores)
    return CorePlan(divide(rollout_cores, num_rollouts), list(trainer_cores))


def divide(cores: Sequence[int], num_shares: int) -> list[list[int]]:
    """Divide cores into contiguous shares whose sizes differ by at most one; too few are dealt one by one in turn."""
    if len(cores) < num_shares:
        return [[cores[share % len(cores)]] for share in range(num_shares)]
    size, rest = divmod(len(cores), num_shares)
    ends = [size * (share + 1) + min(share + 1, rest) for share in range(num_shares)]
    return [list(cores[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def parse_cores(text: str) -> list[int]:
    """Parse cores: `0-3,6` -> [0, 1, 2, 3, 6]. Raise ValueError."""
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f"{text!r} is not a list of cores; write something like 0-3,6")
        cores.update(range(int(first), int(last if dash else first) + 1))
    return sorted(cores)


def run_on_cores(text: str) -> list[int]:
    """Let this thread run on these cores alone; return those of them that it may use. Raise ValueError if none is.

    The system decides, whatever the thread ran on before: OpenMP may have bound it to one core, as OMP_PROC_BIND says.
    """
    try:
        os.sched_setaffinity(0, parse_cores(text))
    except (OSError, OverflowError) as error:
        problem = f"none of the cores {text} may be used by this process"
        raise ValueError(f"{problem}; it runs on {format_cores(available_cores())}") from error
    return available_cores()


def format_cores(cores: Sequence[int]) -> str:
    """Format cores: [0, 1, 2, 3, 6] -> `0-3,6`."""
    parts: list[str] = []
    start = 0
    for index in range(1, len(cores) + 1):
        if index == len(cores) or cores[index] != cores[index - 1] + 1:
            first, last = cores[start], cores[index - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = index
    return ",".join(parts)
