"""A command in a real pseudo-terminal, and what its user sees: just the control codes that our views use."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.launcher import TAKE_TERMINAL, launch

ROOT = Path(__file__).parents[3]
LIMIT_S = 60.0
TOKEN = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+|\x1b")
UNFINISHED = re.compile(r"\x1b(\[\??[\d;]*)?\Z")  # a control code whose rest has not been read yet


class Screen:
    """Rows of text with a cursor. Wraps lines that are too long, as a terminal does."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.num_rows = columns, rows
        self.lines: list[str] = [""]  # all that was shown; the last `num_rows` of them are in sight
        self.row = self.column = 0
        self.has_cursor = True
        self.is_alternate = False
        self.widest = 0

    @property
    def top(self) -> int:
        return max(0, len(self.lines) - self.num_rows)

    @property
    def text(self) -> str:
        return "\n".join(self.lines[self.top :])

    def feed(self, text: str) -> None:
        for match in TOKEN.finditer(text):
            token = match.group()
            if match.group(3):
                self._control(match.group(1), match.group(2), match.group(3))
            elif token == "\r":
                self.column = 0
            elif token == "\n":
                self._line_feed()
            else:
                assert token != "\x1b", "a control code that this screen does not know"
                self._write(token)

    def _line_feed(self) -> None:
        self.row += 1
        while self.row >= len(self.lines):
            self.lines.append("")

    def _write(self, text: str) -> None:
        for character in text:
            if self.column == self.columns:
                self.column = 0
                self._line_feed()
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
            self.column += 1
            self.widest = max(self.widest, self.column)

    def _control(self, private: str, numbers: str, final: str) -> None:
        match private, numbers, final:
            case "?", "25", _:
                self.has_cursor = final == "h"
            case "?", "1049", _:
                self.is_alternate = final == "h"
                self.lines, self.row, self.column = [""], 0, 0
            case "", _, "m":
                pass
            case "", "2", "K":
                self.lines[self.row] = ""
            case "", _, "A":
                self.row = max(self.top, self.row - int(numbers or 1))
            case "", "", "H":
                self.row, self.column = self.top, 0
            case "", "2", "J":
                self.lines[self.top :] = [""] * len(self.lines[self.top :])
            case _:
                raise AssertionError(f"ESC [ {private}{numbers}{final} is not known to this screen")


class Terminal:
    """`onbeat ARGUMENTS` in a pseudo-terminal. Use it as a context."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **env: str) -> None:
        self.screen = Screen(columns, rows)
        self.raw = b""
        self._decoder, self._pending = codecs.getincrementaldecoder("utf-8")(), ""
        self._master, self.slave = pty.openpty()
        self.resize(columns, rows)
        self.modes = termios.tcgetattr(self.slave)
        kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            launch([sys.executable, "-m", "onbeat.cli", *arguments], TAKE_TERMINAL),
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            cwd=ROOT,
            env=kept | {"TERM": "xterm-256color"} | env,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)

    def resize(self, columns: int, rows: int) -> None:
        self.screen.columns, self.screen.num_rows = columns, rows
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait_until(self, is_so: Callable[[], bool], event: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < deadline, f"{event}; the screen:\n{self.screen.text}"
            self._read(0.05)

    def wait_for(self, text: str) -> None:
        self.wait_until(lambda: text in self.screen.text, f"no {text!r} on the screen")

    def wait_for_end(self) -> int:
        self.wait_until(lambda: self.process.poll() is not None, "the command does not end")
        while self._read(0.05):
            pass
        assert self.process.returncode is not None
        return self.process.returncode

    def _read(self, timeout_s: float) -> bool:
        if not select.select([self._master], [], [], timeout_s)[0]:
            return False
        data = os.read(self._master, 65536)
        self.raw += data
        text = self._pending + self._decoder.decode(data)
        unfinished = UNFINISHED.search(text)
        cut = unfinished.start() if unfinished else len(text)
        self.screen.feed(text[:cut])
        self._pending = text[cut:]
        return True
