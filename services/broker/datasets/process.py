"""The broker's side of the data process: starts it when it is first needed, and again after it died."""

import asyncio
import json
import logging
import signal
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from services.broker.datasets import DatasetError, DatasetSpec, PromptItem

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 1 << 30
GRACE_S = 5.0  # the child ends itself at its limit; this long after, it is ended from here


class DatasetProcess:
    """One request at a time; the next ones wait. Never blocks the event loop."""

    def __init__(self, data_dir: Path, timeout_s: float, memory_mb: int) -> None:
        self._data_dir, self._timeout_s, self._memory_mb = data_dir, timeout_s, memory_mb
        self._lock = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._stderr: IO[bytes] | None = None
        self._is_mid_exchange = False  # a request without its answer, left behind by a cancelled caller

    async def read(self, spec: DatasetSpec, first: int, count: int) -> list[PromptItem]:
        """Items `first` to `first + count - 1`. Raises DatasetError, also when the limits of time or memory are hit."""
        request = {"spec": spec.model_dump(mode="json"), "first": first, "count": count, "timeout_s": self._timeout_s}
        async with self._lock:
            answer = await self._ask(json.dumps(request).encode() + b"\n")
        if "error" in answer:
            raise DatasetError(answer["error"]["field"], answer["error"]["message"])
        return [PromptItem.model_validate(item) for item in answer["items"]]

    async def close(self) -> None:
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            child.kill()
            await child.wait()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    async def _ask(self, request: bytes) -> dict[str, Any]:
        child = await self._running_child()
        assert child.stdin is not None
        assert child.stdout is not None
        self._is_mid_exchange, line = True, b""
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S):
                child.stdin.write(request)
                await child.stdin.drain()
                line = await child.stdout.readline()
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            logger.warning("the data process did not answer; it is started again when it is needed")
        if not line.endswith(b"\n"):
            raise DatasetError("data", await self._end_child(child))
        self._is_mid_exchange = False
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _running_child(self) -> asyncio.subprocess.Process:
        if self._child is None or self._child.returncode is not None or self._is_mid_exchange:
            await self.close()
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the child
            self._child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "services.broker.datasets.child"),
                *(str(self._data_dir), str(self._memory_mb)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._stderr,
                limit=MAX_ANSWER_BYTES,
            )
        return self._child

    async def _end_child(self, child: asyncio.subprocess.Process) -> str:
        """End what is left of the child; returns why it gave no answer."""
        try:
            async with asyncio.timeout(0.5):
                code = await child.wait()
        except TimeoutError:
            code = -signal.SIGALRM
        assert self._stderr is not None
        self._stderr.seek(0)
        last_words = self._stderr.read().decode(errors="replace").strip().splitlines()[-1:]
        await self.close()
        if code == -signal.SIGALRM:
            return f"producing prompts took longer than {self._timeout_s:g} s; choose cheaper options or fewer prompts"
        why = last_words[0] if last_words else f"exit code {code}"
        if "MemoryError" in why:
            return f"producing prompts needs more than {self._memory_mb} MB; choose smaller options"
        return f"producing prompts failed: {why}; correct the options or the file"
