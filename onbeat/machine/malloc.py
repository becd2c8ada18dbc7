"""Settings of glibc's allocator for a process that computes on a CPU.

A pass of the trainer, and a load of weights into an engine, take about the same memory each time and give it back.
Kept, and in huge pages, it need not be mapped and cleared anew. Tensors of a GiB and more are given back, and so is
free memory above 4 GiB. All threads use one arena: those of other threads than the first one keep no large tensors.
"""

import ctypes

from onbeat.machine.memory import read_memory

KEEP_FREED = (
    "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1:"
    f"glibc.malloc.mmap_threshold={1 << 30}:glibc.malloc.trim_threshold={4 << 30}"
)

M_MMAP_THRESHOLD = -3  # a constant of malloc.h
LARGE_BYTES = 1 << 20
PLENTY = 1 / 3  # share of the memory of the machine, or container


def give_back_large_at_once() -> None:
    """Make each tensor of a MiB or more return to the system as soon as it is freed, where the allocator is glibc's.

    A sharded model gathers and frees all of its layers again and again. In glibc's heap they would take the gaps
    between longer-lived tensors, and most of that memory would stay free but held.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back_freed() -> None:
    """Return to the system the memory that this process has freed and its allocator keeps, if that is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def give_back_if_scarce() -> None:
    """Give back freed memory, unless the machine has plenty: a process that takes it again has to clear it first."""
    memory = read_memory()
    if memory.available_bytes < PLENTY * memory.total_bytes:
        give_back_freed()
