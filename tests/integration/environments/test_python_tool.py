"""Programs of a model in real processes: what they may not do, they cannot."""

import asyncio
import contextlib
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
from onbeat.process.confine import ARCHITECTURES, REFUSED_CALLS, REFUSED_EVERYWHERE, landlock_version
from tests.waiting import eventually, wait_until_gone

pytestmark = pytest.mark.slow

CAN_UNSHARE = sys.platform == "linux" and subprocess.run(["unshare", "-Urp", "true"], check=False).returncode == 0
HAS_LANDLOCK = landlock_version() >= 1
has_filter = pytest.mark.skipif(platform.machine() not in ARCHITECTURES, reason="unknown numbers of system calls")
may_unshare = pytest.mark.skipif(not CAN_UNSHARE, reason="this kernel or container does not permit namespaces")

# Python's ways to change what a file is, rather than what it holds: of any file, of an open one, and of a link.
CHANGES_OF_FILES = """
os.chmod(path, 0o666)
os.chmod('file', 0o666, dir_fd=folder)
os.fchmod(own.fileno(), 0o666)
os.chown(path, os.getuid(), os.getgid())
os.chown('file', os.getuid(), os.getgid(), dir_fd=folder)
os.lchown(path, os.getuid(), os.getgid())
os.fchown(own.fileno(), os.getuid(), os.getgid())
os.utime(path, (1, 1))
os.utime(own.fileno(), (1, 1))
os.setxattr(path, 'user.x', b'1')
os.setxattr(path, 'user.x', b'1', follow_symlinks=False)
os.setxattr(own.fileno(), 'user.x', b'1')
os.removexattr(path, 'user.here')
os.truncate(path, 0)
os.open(path, os.O_RDONLY | os.O_TRUNC)
os.open(path, os.O_ACCMODE | os.O_TRUNC)
fcntl.flock(own, fcntl.LOCK_SH)
fcntl.fcntl(own, fcntl.F_SETLEASE, fcntl.F_RDLCK)
fcntl.ioctl(own, 0x40086602, b'\\0' * 8)
"""


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
    deep = "import os\nfor _ in range(2000): os.mkdir('d'); os.chdir('d')\nos.mkdir('closed', 0)"
    try:
        result = await run_python(f"{deep}; print('done')", timeout_s=60.0)
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


@has_filter
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


@has_filter
async def test_no_file_changes_mode_owner_times_or_attributes(tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    path.chmod(0o600)
    with contextlib.suppress(OSError):  # this file system has none
        os.setxattr(path, "user.here", b"1")
    before, attributes = path.stat(), os.listxattr(path)
    code = f"""
import ctypes, fcntl, os
path, folder, own = {str(path)!r}, os.open({str(tmp_path)!r}, os.O_PATH), open('own', 'w')
for call in {CHANGES_OF_FILES.strip().splitlines()!r}:
    try:
        eval(call)
        print(call)
    except PermissionError:
        pass
"""
    result = await run_python(code)
    assert (result.stdout, result.stderr) == ("", "")
    after = path.stat()  # ctime is the time of any change
    assert (after.st_mode, after.st_uid, after.st_ctime_ns) == (before.st_mode, before.st_uid, before.st_ctime_ns)
    assert (path.read_text(), os.listxattr(path)) == ("kept", attributes)


@has_filter
async def test_refused_calls_are_refused_by_number():
    numbers = (*REFUSED_CALLS[platform.machine()], *REFUSED_EVERYWHERE)
    code = f"""
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def error_of(number):
    libc.syscall(number, -1, 0, 0, 0, 0, 0)
    return errno.errorcode[ctypes.get_errno()]
print({{error_of(number) for number in {numbers!r}}}, error_of(437), error_of(470), error_of(0x40000000 + 90))
"""
    assert (await run_python(code)).stdout == "{'EPERM'} ENOSYS ENOSYS ENOSYS\n"


@has_filter
async def test_no_memory_outlives_the_program():
    """Not even in three calls, and none beside the limit while it runs."""
    code = """
import ctypes
libc = ctypes.CDLL(None)
print(libc.shmget(0, 5001 << 10, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600), libc.memfd_create(b'x', 0))
"""
    for _ in range(3):
        assert (await run_python(code)).stdout == "-1 -1 -1 -1\n"
    assert str(5001 << 10) not in await asyncio.to_thread(Path("/proc/sysvipc/shm").read_text)


@may_unshare
def test_system_v_memory_is_in_a_space_of_its_own():
    code = "import os; from onbeat.process import confine; confine.enter_process_space(); "
    code += "print(os.readlink('/proc/self/ns/ipc'))"
    entered = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert entered.stdout.strip() not in ("", os.readlink("/proc/self/ns/ipc"))


@may_unshare
async def test_program_of_root_has_no_power_of_root():
    """Also where namespaces are forbidden: here they are, and the machine's name may be changed by root."""
    play = "from onbeat.environments.python_tool import run_python; import asyncio; "
    play += "print(asyncio.run(run_python('import socket; socket.sethostname(chr(120))')).stderr)"
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && hostname y && exec"
    command = ["unshare", "-Uru", "sh", "-c", f'{forbid} "$0" -c "$1"', sys.executable, play]
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    assert "PermissionError" in result.stdout


async def test_usual_libraries_for_files_work():
    code = """
import pathlib, shutil, sqlite3, tarfile, tempfile, zipfile
pathlib.Path('a').write_text('a')
pathlib.Path('a').touch()
shutil.copyfile('a', 'b')
with zipfile.ZipFile('z.zip', 'w') as archive:
    archive.write('a')
zipfile.ZipFile('z.zip').extractall('zip')
with tarfile.open('t.tar', 'w') as archive:
    archive.add('a')
tarfile.open('t.tar').extractall('tar')
with tempfile.TemporaryDirectory() as folder:
    shutil.move('b', folder)
with sqlite3.connect('data.db') as database:
    database.execute('CREATE TABLE t (x)')
print(pathlib.Path('zip/a').read_text(), pathlib.Path('tar/a').read_text())
"""
    result = await run_python(code, timeout_s=20.0)
    assert (result.stdout, result.exit_code) == ("a a\n", 0), result.stderr


async def test_asyncio_and_processes_work_without_sockets():
    code = "import asyncio, subprocess\nasyncio.run(asyncio.sleep(0))\nprint(subprocess.check_output(['echo', 'x']))"
    assert (await run_python(code, timeout_s=20.0)).stdout == "b'x\\n'\n"


@may_unshare
async def test_daemon_of_a_program_ends_with_it():
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

    daemon = "import os, time\nos.setsid()\nopen('pid', 'w').write('x')\ntime.sleep(600)"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {daemon!r}])\ntime.sleep(1)"
    before = own_sleepers()
    await run_python(code, timeout_s=20.0)
    for pid in own_sleepers() - before:
        await asyncio.to_thread(wait_until_gone, Path(f"/proc/{pid}/stat"))
