"""The memory of the machine or container that this process is in, as far as Linux says."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from onbeat.types import HostMemory

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Memory:
    available_bytes: int  # what programs can still get
    total_bytes: int


def read_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> Memory:
    """Return the smaller of what the machine and the container have. Where nothing says, all of it is available."""
    machine = read_meminfo(meminfo)
    try:
        limit = int((cgroup / "memory.max").read_text())  # "max" without a limit
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        used = int((cgroup / "memory.current").read_text()) - int(counts["inactive_file"])  # files can be read again
    except (OSError, ValueError, LookupError):
        return machine
    return Memory(min(machine.available_bytes, max(0, limit - used)), min(machine.total_bytes, limit))


def read_host() -> HostMemory:
    """Return this machine's memory for a heartbeat."""
    memory = read_memory()
    return HostMemory(name=socket.gethostname(), available_bytes=memory.available_bytes, total_bytes=memory.total_bytes)


def read_meminfo(path: Path) -> Memory:
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
        return Memory(sizes["MemAvailable:"], sizes["MemTotal:"])
    except (OSError, ValueError, LookupError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Memory(total, total)
