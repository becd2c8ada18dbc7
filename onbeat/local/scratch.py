"""Temporary directories: one private directory per stack, with a subdirectory for each service."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from onbeat.errors import OnbeatError
from onbeat.temporary import PrivateFolder

PREFIX = "onbeat-"
MAX_SOCKET_PATH_BYTES = 103  # for a UNIX socket on macOS; Linux has four more
LONGEST_INSIDE = "/onbeat-12345678/rollout-999/71c596d2-5304-430f-a62c-53895bd8e4a1"  # the path of a vLLM socket


def make_scratch(report: Callable[[str], None]) -> PrivateFolder:
    """Make the directory in TMPDIR, or in /tmp where paths of sockets would get too long. Raise OnbeatError."""
    parent = Path(tempfile.gettempdir())
    if len(os.fsencode(parent)) + len(LONGEST_INSIDE) > MAX_SOCKET_PATH_BYTES:
        report(f"temporary files go to /tmp: TMPDIR={parent} is too long for the paths of sockets inside")
        parent = Path("/tmp")
    try:
        return PrivateFolder(PREFIX, parent)
    except OSError as error:
        raise OnbeatError(
            f"no temporary folder can be made in {parent}: {error}; free disk space there or set TMPDIR"
        ) from error
