"""A scoring process: it is started, spoken to in JSON lines (see child.py), and killed with SIGKILL."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from services.rollout.rewards.limits import LOAD_S, MAX_ANSWER_BYTES, MAX_OUTPUT_BYTES, Limits
from services.rollout.rewards.outcome import (
    Number,
    RewardError,
    RewardRefused,
    RewardRequest,
    RewardUnavailable,
    Score,
)

STDERR_TAIL_BYTES = 2000
END_S = 1.0  # seconds until a killed process is gone and its last output is read
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


class Answer(BaseModel):
    """A line from the process. It is checked like untrusted input, because a reward may have written it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    request: int


class Loaded(Answer):
    step: Literal["loaded"]


class Scored(Answer):
    step: Literal["scored"]
    position: int
    reward: Number
    parts: dict[str, Number]


class Failed(Answer):
    step: Literal["failed"]
    position: int
    kind: Literal["load", "raised", "invalid", "memory"]
    message: str


class Worn(Answer):
    step: Literal["worn"]


ANSWER: TypeAdapter[Loaded | Scored | Failed | Worn] = TypeAdapter(
    Annotated[Loaded | Scored | Failed | Worn, Field(discriminator="step")]
)


class RewardProcess:
    """A process that leads its own session, so that killing its group also kills what the reward may have started."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.limits = limits
        self.pid = process.pid
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._num_requests = 0
        self._num_printed = 0  # bytes, since the last answer
        self._stderr_tail = b""
        self._stderr_reader = asyncio.create_task(self._read_stderr(process.stderr))

    @classmethod
    async def start(cls, limits: Limits) -> "RewardProcess":
        """Start a process without this service's settings, such as its Redis password. Raises RewardUnavailable."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "services.rollout.rewards.child", *limits.to_arguments()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=inherited | SINGLE_THREADED,
                limit=MAX_ANSWER_BYTES,
                start_new_session=True,
            )
        except OSError as error:  # no memory or no process numbers are left
            raise RewardUnavailable("crashed", f"no scoring process could be started: {error}") from error
        return cls(process, limits)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def score(self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score]) -> None:
        """Score the responses at `indexes` into `scores`, at least one; fewer than all when the process is worn out and
        has to be replaced. Raises RewardError at the first response that has no score."""
        self._num_requests += 1
        message = {
            "request": self._num_requests,
            "reward": request.name,
            "options": request.options,
            "context": request.context,
            "responses": [request.responses[index] for index in indexes],
        }
        await self._send(message, indexes[0])
        if not isinstance(await self._receive(LOAD_S, indexes[0], f"importing {request.name}"), Loaded):
            raise out_of_step(indexes[0])
        for position, index in enumerate(indexes):
            answer = await self._receive(self.limits.timeout_s, index, "scoring")
            if isinstance(answer, Worn):
                await self.kill()
                return
            if not isinstance(answer, Scored) or answer.position != position:
                raise out_of_step(index)
            scores[index] = Score(answer.reward, answer.parts)

    async def _send(self, message: dict[str, Any], index: int) -> None:
        try:
            async with asyncio.timeout(LOAD_S):
                self._stdin.write(json.dumps(message).encode() + b"\n")
                await self._stdin.drain()
        except TimeoutError as error:
            raise RewardUnavailable("timeout", "the scoring process did not take the request", index) from error
        except ConnectionError as error:
            raise await self._death(index) from error

    async def _receive(self, timeout_s: float, index: int, doing: str) -> Loaded | Scored | Failed | Worn:
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._stdout.readline()
        except TimeoutError as error:
            raise RewardUnavailable("timeout", f"{doing} took longer than {timeout_s:g} s", index) from error
        except ValueError as error:
            raise RewardUnavailable("crashed", f"an answer of more than {MAX_ANSWER_BYTES} bytes", index) from error
        if not line.endswith(b"\n"):
            raise await self._death(index)
        self._num_printed = 0
        try:
            answer = ANSWER.validate_json(line)
        except ValueError as error:
            raise out_of_step(index) from error
        if answer.request != self._num_requests:
            raise out_of_step(index)
        if not isinstance(answer, Failed):
            return answer
        failure = RewardUnavailable if answer.kind == "memory" else RewardRefused
        raise failure(answer.kind, answer.message, index)

    async def _death(self, index: int) -> RewardError:
        await self.kill()
        if self._num_printed > MAX_OUTPUT_BYTES:
            message = f"killed: it printed more than {MAX_OUTPUT_BYTES} bytes"
            return RewardUnavailable("crashed", message, index)
        code = self._process.returncode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        how += " (out of CPU time)" if code == -signal.SIGXCPU else ""
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()
        last_words = f"; it said: {lines[-1][:300]}" if lines else ""
        return RewardUnavailable("crashed", f"the scoring process {how}{last_words}", index)

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        """Keep the end of stderr for the error message; kill a process that prints more than MAX_OUTPUT_BYTES."""
        while chunk := await stderr.read(1 << 16):
            self._stderr_tail = (self._stderr_tail + chunk)[-STDERR_TAIL_BYTES:]
            self._num_printed += len(chunk)
            if self._num_printed > MAX_OUTPUT_BYTES:
                self._kill_group()
                return

    async def kill(self) -> None:
        """Send SIGKILL to the whole group. Returns when the process is gone, or after END_S; safe to call twice.

        A process that has left the group may hold the pipes open, and wait() may then wait for that one, too.
        """
        ended = asyncio.create_task(self._process.wait())
        if self._stdout.at_eof():  # it is ending by itself: let its own exit code be seen
            await asyncio.wait({ended}, timeout=END_S)
        self._kill_group()
        await asyncio.wait({ended, self._stderr_reader}, timeout=END_S)
        ended.cancel()
        self._stderr_reader.cancel()
        self._process._transport.close()  # type: ignore[attr-defined]  # our ends of the pipes

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def out_of_step(index: int) -> RewardUnavailable:
    """Return the error for an answer to no request: the reward found the protocol's stream, or forked and returned
    twice."""
    return RewardUnavailable("crashed", "the reward wrote into the protocol, or forked and returned twice", index)
