"""How glibc's allocator serves a process that computes on a CPU.

A pass of the trainer, and a load of weights into an engine, take about the same memory each time and give it back.
Kept, and in huge pages, it need not be made and cleared anew. Tensors of a GiB and more are given back, and so is what
is free above 4 GiB.
"""

KEEP_FREED = f"glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold={1 << 30}:glibc.malloc.trim_threshold={4 << 30}"
