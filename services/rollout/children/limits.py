"""The limits of all child processes, which a child sets on itself before it imports foreign code."""

import contextlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, TextIO

from onbeat.process.confine import MEBIBYTE, lower_limits

MAX_FILE_BYTES = 256 * MEBIBYTE  # size of one file
NICENESS = 5  # the engine goes first
MOST_EXPENDABLE = "1000"  # the kernel's out-of-memory killer takes this process rather than the engine
MAX_MESSAGE = 500  # characters of an error message, which foreign code writes


def restrict_this_process(memory_mb: int, max_open_files: int) -> None:
    lower_limits(
        {
            resource.RLIMIT_AS: memory_mb * MEBIBYTE,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
            resource.RLIMIT_NOFILE: max_open_files,
        }
    )
    os.nice(NICENESS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # /proc may be read-only: then the kernel chooses by size
            Path("/proc/self/oom_score_adj").write_text(MOST_EXPENDABLE, encoding="utf-8")


class Answers:
    """The child's end of the protocol: lines of JSON, each with the number of its request."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        os.register_at_fork(after_in_child=self._fall_silent)

    def _fall_silent(self) -> None:
        """Keep a process that foreign code forks, and that runs on here, from answering a second time."""
        os.dup2(1, self._stream.fileno())

    def send(self, request: int, step: str, **fields: Any) -> None:
        line = json.dumps({"request": request, "step": step, **fields}, allow_nan=False)
        self._stream.write(line + "\n")
        self._stream.flush()


def take_protocol_streams() -> tuple[TextIO, Answers]:
    """Keep stdin and stdout for the protocol: user code reads an empty stdin, and what it prints goes to stderr."""
    requests, answers = os.fdopen(os.dup(0)), Answers(os.fdopen(os.dup(1), "w"))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.register_at_fork(after_in_child=lambda: os.dup2(nothing, requests.fileno()))  # forks take no request
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return requests, answers
