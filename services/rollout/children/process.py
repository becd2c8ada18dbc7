"""The parent's side of a child process: it is started, spoken to in lines of JSON, and killed with SIGKILL."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

from onbeat.machine.malloc import KEEP_FREED
from services.rollout.children.limits import MAX_ANSWER_BYTES, MAX_OUTPUT_BYTES
from services.rollout.deadlines import LOAD_S

STDERR_TAIL_BYTES = 2000
END_S = 1.0  # seconds until a killed process is gone and its last output is read
WAS_OFFLINE = os.environ.get("HF_HUB_OFFLINE")  # when this process was started: vLLM's engine sets it
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without what is for the service or its engine alone: its settings, an allocator
    that keeps freed memory, no preparation of gRPC for forks, and the engine's ban on downloads. No proxy is to come
    between an environment and this machine: it would see the keys of sessions."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")}
    if inherited.get("GLIBC_TUNABLES") == KEEP_FREED:
        del inherited["GLIBC_TUNABLES"]
    for name in ("GRPC_ENABLE_FORK_SUPPORT", "HF_HUB_OFFLINE"):
        inherited.pop(name, None)
    past_proxies = inherited.get("no_proxy") or inherited.get("NO_PROXY") or ""
    if past_proxies != "*":
        past_proxies = ",".join(filter(None, (past_proxies, "127.0.0.1", "localhost")))
    inherited["no_proxy"] = inherited["NO_PROXY"] = past_proxies
    return inherited if WAS_OFFLINE is None else inherited | {"HF_HUB_OFFLINE": WAS_OFFLINE}


class ChildDied(Exception):
    """The child ended, or spoke so that it had to be ended. The message says how. `is_flood`: it printed too much."""

    def __init__(self, message: str, *, is_flood: bool = False) -> None:
        super().__init__(message)
        self.is_flood = is_flood


class ChildProcess:
    """A process that leads its own session, so that killing its group also kills what its code may have started."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.pid = process.pid
        self._name = name  # in messages
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._num_printed = 0  # bytes, since the last answer
        self._stderr_tail = b""
        self._stderr_reader = asyncio.create_task(self._read_stderr(process.stderr))

    @classmethod
    async def start(cls, name: str, module: str, *arguments: str) -> "ChildProcess":
        """Run a module without this service's settings, such as its Redis password. Raises OSError when no memory or no
        process numbers are left."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, *arguments),  # -P: a folder `services` of the user is not ours
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=inherited_environment() | SINGLE_THREADED,
            limit=MAX_ANSWER_BYTES,
            start_new_session=True,
        )
        return cls(process, name)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def send(self, message: dict[str, Any]) -> None:
        """Write one line. Raises TimeoutError when it is not taken, ChildDied."""
        try:
            async with asyncio.timeout(LOAD_S):
                self._stdin.write(json.dumps(message).encode() + b"\n")
                await self._stdin.drain()
        except ConnectionError as error:
            raise await self._death() from error

    async def receive(self, timeout_s: float) -> bytes:
        """Return the next line. Raises TimeoutError when none comes in time, ChildDied."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._stdout.readline()
        except ValueError as error:
            raise ChildDied(f"an answer of more than {MAX_ANSWER_BYTES} bytes") from error
        if not line.endswith(b"\n"):
            raise await self._death()
        self._num_printed = 0
        return line

    async def _death(self) -> ChildDied:
        await self.kill()
        if self._num_printed > MAX_OUTPUT_BYTES:
            return ChildDied(f"killed: it printed more than {MAX_OUTPUT_BYTES} bytes", is_flood=True)
        code = self._process.returncode or 0
        how = f"was killed by {name_of_signal(-code)}" if code < 0 else f"exited with code {code}"
        how += " (out of CPU time)" if code == -signal.SIGXCPU else ""
        lines = self._stderr_tail.decode(errors="replace").strip().splitlines()
        last_words = f"; it said: {lines[-1][:300]}" if lines else ""
        return ChildDied(f"{self._name} {how}{last_words}")

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
        try:
            if self._stdout.at_eof():  # it is ending by itself: let its own exit code be seen
                await asyncio.wait({ended}, timeout=END_S)
        finally:  # this may have been cancelled
            self._kill_group()
            try:
                await asyncio.wait({ended, self._stderr_reader}, timeout=END_S)
            finally:
                ended.cancel()
                self._stderr_reader.cancel()
                self._process._transport.close()  # type: ignore[attr-defined]  # our ends of the pipes

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def name_of_signal(number: int) -> str:
    """Return its name; real-time signals have none."""
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")
