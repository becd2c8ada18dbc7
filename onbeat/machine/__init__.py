"""Facts about this machine: processor, cores, accelerators, allocator, memory, disk space."""
