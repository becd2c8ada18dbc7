"""Child processes that run a module of Onbeat: the parent starts one, exchanges lines of JSON with it, and kills it
together with what it has started."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import Any

MAX_ANSWER_BYTES = 1 << 20  # size of a line of a child
MAX_OUTPUT_BYTES = 4 << 20  # bytes printed between two answers; the parent kills a child that prints more
STDERR_TAIL_BYTES = 2000
MAX_LAST_WORDS = 300  # characters
END_S = 1.0  # seconds until a killed process is gone and its last output is read
WAS_OFFLINE = os.environ.get("HF_HUB_OFFLINE")  # when this process was started: vLLM's engine sets it
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


def command_of(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this Python. A folder `services` of the user is not ours: hence -P."""
    return [sys.executable, "-P", "-m", module, *arguments]


def last_words(stderr: str) -> str:
    """Return the last line of what a process wrote to stderr, where Python puts the error; '' if it wrote nothing."""
    return (stderr.strip().splitlines() or [""])[-1]


def kill_group(pid: int) -> None:
    """Kill a process that leads its group, and what it has started in that group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


async def end_group(process: asyncio.subprocess.Process, *readers: asyncio.Task[None]) -> None:
    """Kill the group. Returns when the process is gone and its output is read, or after END_S; safe to call twice.

    A process that has left the group may hold the pipes open, and wait() may then wait for that one, too.
    """
    kill_group(process.pid)
    tasks = {asyncio.create_task(process.wait()), *readers}
    try:
        await asyncio.wait(tasks, timeout=END_S)
    finally:
        for task in tasks:
            task.cancel()
        process._transport.close()  # type: ignore[attr-defined]  # our ends of the pipes


def inherited_environment() -> dict[str, str]:
    """Return this process's environment without what is for the service or its engine alone: its settings, an allocator
    that keeps freed memory, no preparation of gRPC for forks, and the engine's ban on downloads. No proxy is to come
    between an environment and this machine: it would see the keys of sessions."""
    from onbeat.machine.malloc import KEEP_FREED  # imports pydantic, which `onbeat --help` does without

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
    """The child ended, or spoke so that it had to be ended. The message says how. `is_flood`: it printed too much.
    `exit_code`: of one that ended by itself or by a signal; negative for a signal."""

    def __init__(self, message: str, *, is_flood: bool = False, exit_code: int = 0, last_words: str = "") -> None:
        super().__init__(message)
        self.is_flood, self.exit_code, self.last_words = is_flood, exit_code, last_words


class ChildProcess:
    """A process that leads its own session, so that killing its group also kills what its code may have started."""

    def __init__(
        self, process: asyncio.subprocess.Process, name: str, max_answer_bytes: int = MAX_ANSWER_BYTES
    ) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self.pid = process.pid
        self._name, self._max_answer_bytes = name, max_answer_bytes
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._num_printed = 0  # bytes, since the last answer
        self._stderr_tail = b""
        self._stderr_reader = asyncio.create_task(self._read_stderr(process.stderr))

    @classmethod
    async def start(
        cls, name: str, module: str, *arguments: str, max_answer_bytes: int = MAX_ANSWER_BYTES
    ) -> "ChildProcess":
        """Run a module without this service's settings, such as its Redis password. `name` is for messages. Raises
        OSError when no memory or no process numbers are left."""
        process = await asyncio.create_subprocess_exec(
            *command_of(module, *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=inherited_environment() | SINGLE_THREADED,
            limit=max_answer_bytes,
            start_new_session=True,
        )
        return cls(process, name, max_answer_bytes)

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def send(self, message: dict[str, Any], timeout_s: float) -> None:
        """Write one line. Raises TimeoutError when it is not taken, ChildDied."""
        try:
            async with asyncio.timeout(timeout_s):
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
            raise ChildDied(f"an answer of more than {self._max_answer_bytes} bytes") from error
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
        said = last_words(self._stderr_tail.decode(errors="replace"))[:MAX_LAST_WORDS]
        message = f"{self._name} {how}" + (f"; it said: {said}" if said else "")
        return ChildDied(message, exit_code=code, last_words=said)

    def end_input(self) -> None:
        """Close the child's input: then it ends by itself."""
        self._stdin.close()

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        """Keep the end of stderr for the error message; kill a process that prints more than MAX_OUTPUT_BYTES."""
        while chunk := await stderr.read(1 << 16):
            self._stderr_tail = (self._stderr_tail + chunk)[-STDERR_TAIL_BYTES:]
            self._num_printed += len(chunk)
            if self._num_printed > MAX_OUTPUT_BYTES:
                kill_group(self.pid)
                return

    async def kill(self) -> None:
        """End the whole group; safe to call twice."""
        try:
            if self._stdout.at_eof():  # it is ending by itself: let its own exit code be seen
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), END_S)
        finally:  # this may have been cancelled
            await end_group(self._process, self._stderr_reader)


def name_of_signal(number: int) -> str:
    """Return its name; real-time signals have none."""
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")
