"""One scoring process: started, spoken to in JSON lines (see child.py), and killed without mercy."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

LOAD_DEADLINE_S = 120.0  # start of Python and import of the reward, not counted as scoring
MAX_LINE_BYTES = 1 << 20
STDERR_TAIL_BYTES = 2000
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}

FailureKind = Literal["load", "raised", "invalid", "memory", "timeout", "crashed"]
HARMLESS: frozenset[FailureKind] = frozenset({"load", "raised", "invalid"})  # the process is as good as before


class RewardError(Exception):
    """Response number `index` has no reward; why is in `kind` and the message."""

    def __init__(self, kind: FailureKind, message: str, index: int) -> None:
        super().__init__(f"response {index}: {kind}: {message}")
        self.kind = kind
        self.index = index


@dataclass(frozen=True)
class RewardRequest:
    """The responses of one group and how to score them."""

    name: str
    options: dict[str, Any]
    context: dict[str, Any]
    responses: list[str]
    timeout_s: float  # hard limit for one response
    memory_limit_mb: int  # hard limit of the process, address space
    max_attempts: int  # tries per response


@dataclass(frozen=True)
class Score:
    reward: float
    parts: dict[str, float]


class RewardProcess:
    """Leads its own session, so that killing its group takes along what the reward may have started."""

    def __init__(self, process: asyncio.subprocess.Process, memory_limit_mb: int) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.memory_limit_mb = memory_limit_mb
        self.pid = process.pid
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._stderr_tail = b""
        self._stderr_reader = asyncio.create_task(self._keep_stderr_tail(process.stderr))

    @classmethod
    async def start(cls, memory_limit_mb: int) -> "RewardProcess":
        """The settings of this service, its Redis password among them, stay behind."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.rollout.rewards.child", str(memory_limit_mb)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=inherited | SINGLE_THREADED,
            limit=MAX_LINE_BYTES,
            start_new_session=True,
        )
        return cls(process, memory_limit_mb)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def score(self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score]) -> None:
        """Score the responses at `indexes` into `scores`. Raises RewardError at the first that has none."""
        message = {
            "reward": request.name,
            "options": request.options,
            "context": request.context,
            "responses": [request.responses[index] for index in indexes],
        }
        await self._send(message, indexes[0])
        await self._receive(LOAD_DEADLINE_S, indexes[0], f"importing {request.name}")
        for index in indexes:
            answer = await self._receive(request.timeout_s, index, "scoring")
            scores[index] = Score(answer["reward"], answer["parts"])

    async def _send(self, message: dict[str, Any], index: int) -> None:
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                self._stdin.write(json.dumps(message).encode() + b"\n")
                await self._stdin.drain()
        except TimeoutError as error:
            raise RewardError("timeout", "the scoring process did not take the request", index) from error
        except ConnectionError as error:
            raise await self._death(index) from error

    async def _receive(self, timeout_s: float, index: int, doing: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._stdout.readline()
        except TimeoutError as error:
            raise RewardError("timeout", f"{doing} took longer than {timeout_s:g} s", index) from error
        except ValueError as error:
            raise RewardError("crashed", f"the answer is longer than {MAX_LINE_BYTES} bytes", index) from error
        if not line.endswith(b"\n"):
            raise await self._death(index)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise RewardError("crashed", "the answer is no JSON: the reward wrote into the protocol", index) from error
        if "kind" in answer:
            raise RewardError(answer["kind"], answer["message"], index)
        return answer

    async def _death(self, index: int) -> RewardError:
        await self.kill()
        code = self._process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()
        last_words = f"; it said: {lines[-1][:300]}" if lines else ""
        return RewardError("crashed", f"the scoring process {how}{last_words}", index)

    async def _keep_stderr_tail(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(1 << 16):
            self._stderr_tail = (self._stderr_tail + chunk)[-STDERR_TAIL_BYTES:]

    async def kill(self) -> None:
        """SIGKILL to the whole group. Returns when the process is gone; safe to call twice."""
        if self._stdout.at_eof():  # it is ending by itself: let its own exit code be seen
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.wait({self._stderr_reader}, timeout=1.0)
        self._stderr_reader.cancel()
