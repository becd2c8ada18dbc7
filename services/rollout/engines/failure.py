"""The cause of a failed engine start, in one line. vLLM logs it where it occurs, often in a process of its own, and
raises "See root cause above" in ours: a log handler in each of its processes keeps the first one in a file.
"""

import contextlib
import logging
import os
from pathlib import Path

from pydantic import ValidationError

from onbeat.engines import EngineDied

CAUSE_FILE = "ONBEAT_ENGINE_CAUSE_FILE"  # environment variable that vLLM's processes inherit
MAX_CHARACTERS = 600
CORE_FAILED = "Engine core initialization failed"
KILLED = ": -9}"  # exit code of a core, in vLLM's message: SIGKILL
# Parts of messages of vLLM that leave the cause to its log.
ELSEWHERE = ("See root cause above", "See stack trace for root cause", "check the logs for more details")


class EngineStartFailed(Exception):
    """An engine did not start. The message is the cause, with the type of its error, as another process logged it."""


def describe_cause(error: BaseException) -> str:
    """Return the innermost cause of an error as one line, its type first.

    >>> try:
    ...     raise RuntimeError("cannot build the model") from ImportError("No module named 'torchvision'")
    ... except RuntimeError as error:
    ...     describe_cause(error)
    "ImportError: No module named 'torchvision'"
    """
    visited = {id(error)}
    while not is_told(error) and (inner := cause_within(error)) is not None and id(inner) not in visited:
        visited.add(id(inner))
        error = inner
    if is_told(error):
        return shorten(str(error).strip().splitlines()[-1])
    return shorten(f"{type(error).__name__}: {error}")


def is_told(error: BaseException) -> bool:
    """Return whether the last line of the error is the cause, with its type, as another process printed it."""
    return isinstance(error, EngineStartFailed) or "Traceback (most recent call last)" in str(error)


def cause_within(error: BaseException) -> BaseException | None:
    """Return the error that this one was raised from, or that it wraps. An error that was merely being handled does not
    count: transformers names an unknown architecture while it handles a KeyError."""
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0]
    if isinstance(error, ValidationError):
        inner = (details.get("ctx", {}).get("error") for details in error.errors())
        return next((cause for cause in inner if isinstance(cause, BaseException)), error.__cause__)
    return error.__cause__


def shorten(text: str) -> str:
    """Return the text on one line, with its middle left out where it is long."""
    line = " ".join(text.split())
    half = MAX_CHARACTERS // 2
    return line if len(line) <= MAX_CHARACTERS else f"{line[:half]} ... {line[-half:]}"


class CauseKeeper(logging.Handler):
    """A handler that writes the cause of the first logged exception into the file of the start."""

    def emit(self, record: logging.LogRecord) -> None:
        path, error = os.environ.get(CAUSE_FILE), record.exc_info and record.exc_info[1]
        if path and error:
            with contextlib.suppress(OSError), open(path, "x", encoding="utf-8") as file:  # only the first one
                file.write(describe_cause(error))


def keep_causes() -> None:
    """Keep the cause of a failed start in this process of vLLM; repeated calls change nothing."""
    logger = logging.getLogger("vllm")
    if not any(isinstance(handler, CauseKeeper) for handler in logger.handlers):
        logger.addHandler(CauseKeeper(logging.ERROR))


def kept_cause(error: BaseException, path: Path) -> str:
    """Return the cause that the error of a start leaves to the log; '' if it names it itself, or none was logged.

    Raises EngineDied for a core that was killed, as by a lack of memory, or died without an error.
    """
    text = str(error)
    if not any(part in text for part in ELSEWHERE):
        return ""
    cause = path.read_text("utf-8") if path.exists() else ""
    if CORE_FAILED in text and (not cause or KILLED in text):
        raise EngineDied(f"vLLM's engine core died while it started: {text}") from error
    return cause
