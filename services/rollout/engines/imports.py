"""The import of large libraries."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

IMPORTING = threading.Lock()  # circular imports in two threads meet half-made modules and fail


@contextmanager
def large_import() -> Iterator[None]:
    """Import in this block: one thread at a time, and without garbage collection, which would look through all that
    was imported before, again and again (a fifth of the time that vLLM takes)."""
    with IMPORTING:
        gc.disable()
        try:
            yield
        finally:
            gc.enable()
