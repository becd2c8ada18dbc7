"""Python code that a model wrote, run in a limited child process.

What is contained and what is not is in docs/environments.md: this guards against accidents and clumsy code. Against an
enemy use a virtual machine.
"""

import asyncio
import json
import math
import os
import signal
import site
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from onbeat.process import confine
from onbeat.process.children import end_group
from onbeat.process.temporary import PrivateFolder, remove_dead

PREFIX = "onbeat-python-"
MAX_OUTPUT_BYTES = 64 << 10  # limit of stdout and of stderr; the process is ended beyond it
MAX_FILE_MB = 16
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")


@dataclass(frozen=True)
class PythonResult:
    """The end of a program. `exit_code` is negative or above 128 when a signal ended it."""

    stdout: str
    stderr: str
    exit_code: int
    is_timeout: bool = False
    is_cut: bool = False  # it printed more than MAX_OUTPUT_BYTES and was ended

    @property
    def is_ok(self) -> bool:
        return self.exit_code == 0 and not self.is_timeout and not self.is_cut


async def run_python(code: str, timeout_s: float = 5.0, memory_mb: int = 512) -> PythonResult:
    """Run a program in an empty folder that is deleted afterwards, whatever the program made of it. Raises OSError when
    no process can be started."""
    await asyncio.to_thread(remove_dead, PREFIX, Path(tempfile.gettempdir()))  # this may take long
    private = PrivateFolder(PREFIX)  # removed later if this process is killed
    folder = str(private.path / "home")
    try:
        os.mkdir(folder)
        (Path(folder) / "main.py").write_text(code, "utf-8", errors="replace")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", confine.__file__, json.dumps(wishes(folder, timeout_s, memory_mb))),
            *(sys.executable, "-I", "-X", "utf8", "main.py"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        return await read_result(process, timeout_s)
    finally:
        await asyncio.to_thread(private.remove)


def wishes(folder: str, timeout_s: float, memory_mb: int) -> dict[str, object]:
    """Return the limits of a program, as confine.py takes them."""
    return {
        "parent": os.getpid(),
        "folder": folder,
        "readable": [*SYSTEM_FOLDERS, sys.base_prefix, sys.prefix, *site.getsitepackages()],
        "memory_mb": memory_mb,
        "file_mb": MAX_FILE_MB,
        "cpu_s": math.ceil(timeout_s) + 1,
    }


async def read_result(process: asyncio.subprocess.Process, timeout_s: float) -> PythonResult:
    """Return the end of a program, which is killed if it takes too long or prints too much."""
    assert process.stdout is not None
    assert process.stderr is not None
    outputs = bytearray(), bytearray()
    is_timeout = False
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(read_up_to(process.stdout, outputs[0]), read_up_to(process.stderr, outputs[1]))
            await process.wait()
    except TimeoutError:
        is_timeout = True
    except OutputTooLong:
        pass
    finally:  # this may have been cancelled
        await end_group(process)
    stdout, stderr = (output[:MAX_OUTPUT_BYTES].decode(errors="replace") for output in outputs)
    is_cut = any(len(output) > MAX_OUTPUT_BYTES for output in outputs)
    code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return PythonResult(stdout, stderr, code, is_timeout, is_cut)


class OutputTooLong(Exception):
    """A program printed more than MAX_OUTPUT_BYTES."""


async def read_up_to(stream: asyncio.StreamReader, output: bytearray) -> None:
    while chunk := await stream.read(1 << 14):
        output += chunk
        if len(output) > MAX_OUTPUT_BYTES:
            raise OutputTooLong
