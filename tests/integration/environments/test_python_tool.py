"""Programs of a model in real processes: what they may not do, they cannot."""

import asyncio
import os
import platform
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from onbeat.environments import python_tool
from onbeat.environments.python_tool import run_python
from onbeat.process.confine import SOCKET_CALLS, landlock_version
from tests.waiting import eventually, wait_until_gone

pytestmark = pytest.mark.slow

CAN_UNSHARE = sys.platform == "linux" and subprocess.run(["unshare", "-Urp", "true"], check=False).returncode == 0
HAS_LANDLOCK = landlock_version() >= 1


async def test_result_has_the_output_and_the_exit_code():
    result = await run_python("import sys; print('Grüße'); print('no', file=sys.stderr); sys.exit(3)")
    assert (result.stdout, result.stderr, result.exit_code, result.is_ok) == ("Grüße\n", "no\n", 3, False)
    assert (await run_python("import json, math; print(math.sqrt(9))")).is_ok
    assert "ZeroDivisionError" in (await run_python("1 / 0")).stderr


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
async def test_program_that_does_not_end_is_killed(code):
    result = await run_python(f"print('begun', flush=True); {code}" if ";" in code else code, timeout_s=3.0)
    assert result.is_timeout
    assert not result.is_ok


async def test_memory_and_output_and_files_are_limited():
    assert "MemoryError" in (await run_python("x = bytes(1 << 30)", memory_mb=256)).stderr
    flood = await run_python("while True: print('x' * 1000)", timeout_s=60.0)
    assert (flood.is_cut, flood.is_timeout, len(flood.stdout)) == (True, False, python_tool.MAX_OUTPUT_BYTES)
    assert "File too large" in (await run_python("open('big', 'wb').truncate(1 << 40)")).stderr


async def test_settings_and_stdin_are_hidden(monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hidden")
    result = await run_python("import os, sys; print(sorted(os.environ), repr(sys.stdin.read()))")
    assert "SECRET_KEY" not in result.stdout
    assert "''" in result.stdout


async def test_folder_is_empty_and_goes_with_the_program():
    result = await run_python("import os; open('x', 'w').close(); print(os.getcwd(), sorted(os.listdir()))")
    folder, _, files = result.stdout.partition(" ")
    assert files.strip() == "['main.py', 'x']"
    assert not await asyncio.to_thread(os.path.exists, folder)


async def test_folder_of_a_killed_owner_goes_with_the_next_program(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = (
        "import os, time; root = os.getcwd()\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')\nos.mkdir('closed', 0)"
    )
    program = f"{deep}; open(root + '/begun', 'w'); time.sleep(60)"
    play = "from onbeat.environments.python_tool import run_python; import asyncio; "
    play += f"asyncio.run(run_python({program!r}, timeout_s=60))"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", play, env=environment)
    await eventually("the program runs", lambda: asyncio.to_thread(lambda: list(tmp_path.glob("*/home/begun"))))
    owner.kill()
    await owner.wait()
    assert (await run_python("pass")).is_ok
    assert not list(tmp_path.iterdir())


async def test_deep_and_closed_folders_go_with_the_program(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')\nos.mkdir('closed'); os.mkdir('closed/x')"
    try:
        result = await run_python(f"{deep}; os.chmod('closed', 0); print('done')", timeout_s=60.0)
        assert result.stdout == "done\n"
        assert not list(tmp_path.iterdir())
    finally:  # pytest could not delete it either
        await asyncio.to_thread(subprocess.run, ["rm", "-rf", *tmp_path.iterdir()], check=True)


@pytest.mark.skipif(not HAS_LANDLOCK, reason="the kernel has no Landlock")
async def test_files_outside_the_folder_are_closed(tmp_path):
    (tmp_path / "secret").write_text("secret")
    for code in (f"open({str(tmp_path / 'secret')!r})", f"open({str(tmp_path / 'new')!r}, 'w')", "open('/etc/passwd')"):
        assert "PermissionError" in (await run_python(code)).stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "secret"]
    assert (await run_python("open('/etc/ld.so.cache', 'rb').read(1)")).is_ok


@pytest.mark.skipif(platform.machine() not in SOCKET_CALLS, reason="unknown numbers of system calls")
async def test_no_socket_reaches_another_program(tmp_path):
    """Neither loopback nor a UNIX socket with a path, by a stream or by datagrams."""
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    path = str(tmp_path / "log")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as log:
        log.bind(path)
        for code in (
            f"socket.create_connection(('127.0.0.1', {port}), 2)",
            f"socket.socket(socket.AF_UNIX).connect({path!r})",
            f"socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b'x', {path!r})",
        ):
            assert "PermissionError" in (await run_python(f"import socket; {code}")).stderr
    server.close()


async def test_asyncio_and_processes_work_without_sockets():
    code = "import asyncio, subprocess\nasyncio.run(asyncio.sleep(0))\nprint(subprocess.check_output(['echo', 'x']))"
    assert (await run_python(code, timeout_s=20.0)).stdout == "b'x\\n'\n"


@pytest.mark.skipif(not CAN_UNSHARE, reason="this kernel or container does not permit namespaces")
async def test_daemon_of_a_program_ends_with_it():
    daemon = "import os, time\nos.setsid()\nopen('pid', 'w').write('x')\ntime.sleep(600)"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {daemon!r}])\ntime.sleep(1)"
    before = own_sleepers()
    await run_python(code, timeout_s=20.0)
    for pid in own_sleepers() - before:
        await asyncio.to_thread(wait_until_gone, Path(f"/proc/{pid}/stat"))


def own_sleepers() -> set[str]:
    names = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                command = (folder / "cmdline").read_text()
            except OSError:
                continue
            if "os.setsid()" in command and folder.name != str(os.getpid()):
                names.add(folder.name)
    return names
