"""Logging of all services: text for a terminal, one JSON object per line for containers. Only `__main__` sets it up."""

import contextlib
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

TEXT = "%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s"
CHATTY = ("httpx", "httpcore", "asyncio", "urllib3")
STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    """The time, level, logger and message of a record, then its `extra` fields, then the traceback, as JSON.

    >>> line = JsonFormatter().format(logging.makeLogRecord({"msg": "hello", "job_id": "j1"}))
    >>> json.loads(line)["message"], json.loads(line)["job_id"]
    ('hello', 'j1')
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname, "logger": record.name}
        line["message"] = record.getMessage()
        line |= {name: value for name, value in vars(record).items() if name not in STANDARD_ATTRIBUTES}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class LossyStream:
    """A stream that loses what cannot be written. A full disk under the logs must not fail what a library does while it
    draws its progress bar."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def configure(fmt: str = "text", level: str = "INFO") -> None:
    """Send all logging of this process to standard error, which loses what cannot be written, as standard output does
    from now on. Raise ValueError for an unknown format or level."""
    sys.stdout, sys.stderr = LossyStream(sys.stdout), LossyStream(sys.stderr)
    if fmt not in ("text", "json"):
        raise ValueError(f"log format {fmt!r} is not known; set ONBEAT_LOG_FORMAT to text or json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if fmt == "json" else logging.Formatter(TEXT, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
