"""The memory of the machine or container that this process is in, as far as Linux says."""

import os
import socket
from pathlib import Path

from onbeat.contracts.records import HostMemory

MEMINFO, VMSTAT, CGROUP = Path("/proc/meminfo"), Path("/proc/vmstat"), Path("/sys/fs/cgroup")

# Each control group has files with the limit, the use and its parts; the last name is the part that is pages of files.
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file")
VERSION_2 = ("memory.max", "memory.current", "memory.stat", "inactive_file")


def read_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> HostMemory:
    """Return the smaller of what the machine and the container have. Where nothing says, all of it is available."""
    machine = read_meminfo(meminfo)
    *names, reclaimable = VERSION_2
    if (cgroup / "memory" / VERSION_1[0]).exists():
        cgroup, (*names, reclaimable) = cgroup / "memory", VERSION_1
    try:
        most, current, parts = ((cgroup / name).read_text("utf-8") for name in names)
        limit = int(most)  # "max", or more than any machine has, without a limit
        used = int(current) - int(dict(line.split() for line in parts.splitlines())[reclaimable])
    except (OSError, ValueError, LookupError):
        return machine
    return HostMemory(
        name=machine.name,
        available_bytes=min(machine.available_bytes, max(0, limit - used)),
        total_bytes=min(machine.total_bytes, limit),
    )


def num_oom_kills(vmstat: Path = VMSTAT) -> int:
    """Return how many processes the kernel has killed for want of memory since the machine's start; 0 if unknown."""
    try:
        counts = dict(line.split() for line in vmstat.read_text("utf-8").splitlines())
        return int(counts["oom_kill"])
    except (OSError, ValueError, LookupError):
        return 0


def read_meminfo(path: Path) -> HostMemory:
    try:
        lines = (line.split() for line in path.read_text("utf-8").splitlines())
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
        available, total = sizes["MemAvailable:"], sizes["MemTotal:"]
    except (OSError, ValueError, LookupError):
        available = total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return HostMemory(name=socket.gethostname(), available_bytes=available, total_bytes=total)
