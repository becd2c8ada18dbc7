"""The lock for imports of large libraries: in two threads, their circular imports meet half-made modules and fail."""

import threading

IMPORTING = threading.Lock()
