"""How glibc's allocator serves a process that computes on a CPU.

A pass of the trainer, and a load of weights into an engine, take about the same memory each time and give it back.
Kept, and in huge pages, it need not be made and cleared anew. Tensors of a GiB and more are given back, and so is what
is free above 4 GiB.
"""

import ctypes

KEEP_FREED = f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={1 << 30}:glibc.malloc.trim_threshold={4 << 30}"

M_MMAP_THRESHOLD = -3  # of malloc.h
LARGE_BYTES = 1 << 20


def give_back_large_at_once() -> None:
    """From now on return each tensor of a MiB and more to the system as soon as it is freed, where that is glibc's.

    A sharded model gathers and frees all of its layers again and again. From glibc's heap they would come out of what
    is free between longer-lived tensors, and most of that would stay free but held.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back_freed() -> None:
    """Return to the system what this process has freed and its allocator keeps, where that is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
