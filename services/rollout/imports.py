"""One thread at a time imports the large libraries: in two, their circular imports meet half-made modules and fail."""

import threading

IMPORTING = threading.Lock()
