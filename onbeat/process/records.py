"""A read-only broker on the records of a data folder: what it needs is started for its reader, and ends with it."""

import json
import select
import subprocess
from pathlib import Path
from typing import Any

from onbeat.contracts.errors import OnbeatError
from onbeat.process.children import command_of

OPENER = command_of("onbeat.local.records")  # a program that this package does not import
START_DEADLINE_S = 120.0
END_DEADLINE_S = 30.0


class OpenRecords:
    """Records that can be read at `url` until `close`, at the latest until this process ends.

    Making it takes some seconds, and raises OnbeatError when the records cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [*OPENER, str(folder)],
            stdin=subprocess.PIPE,  # the program ends when this closes, also by the death of this process
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for the reader, which then closes the records
        )
        try:
            self.url = self._first_line(folder)
        except BaseException:
            self.close()
            raise

    def _first_line(self, folder: Path) -> str:
        assert self._process.stdout is not None
        is_there = select.select([self._process.stdout], [], [], START_DEADLINE_S)[0]
        line = self._process.stdout.readline() if is_there else ""
        answer: dict[str, Any] = json.loads(line or "{}")
        if "url" in answer:
            return str(answer["url"])
        raise OnbeatError(answer.get("error") or f"the records in {folder} cannot be opened; see {folder / 'logs'}")

    def close(self) -> None:
        """End the broker and its Redis. Safe to repeat."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the guards of the services end them
            self._process.wait()
        self._process.stdout.close()
