"""A forked engine core lets go of what belongs to the service that forked it."""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch

from services.rollout.engines.imports import IMPORTING
from services.rollout.engines.vllm_core import CoreContext
from tests.waiting import wait_until

DEADLINE_S = 20.0


def no_memory(_: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stand in for vLLM, whose import would take seconds; its plug-ins are already loaded."""
    package, plugins = ModuleType("vllm"), SimpleNamespace(plugins_loaded=True)
    package.plugins = plugins  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    return plugins


def report_of_core(look) -> object:
    """Return what `look` returns in a forked core."""
    context = CoreContext()
    ours, theirs = context.Pipe(duplex=False)

    def target(answers: Connection) -> None:
        answers.send(look())

    core = context.Process(target=target, args=(theirs,), name="EngineCore")
    core.start()
    try:
        assert ours.poll(DEADLINE_S), "the core did not answer"
        return ours.recv()
    finally:
        core.kill()
        core.join(DEADLINE_S)


def test_a_core_holds_no_connection_or_file_of_the_service(tmp_path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, (tmp_path / "weights").open("w") as weights:
        held = [server.fileno(), weights.fileno()]
        links = report_of_core(lambda: [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in held])
        assert links == [os.devnull, os.devnull]
        assert os.readlink(f"/proc/self/fd/{held[0]}").startswith("socket:"), "the service lost its own"


def test_a_signal_to_the_core_does_not_wake_the_service() -> None:
    def signal_itself() -> int:
        signal.signal(signal.SIGUSR1, lambda *_: None)
        os.kill(os.getpid(), signal.SIGUSR1)
        return os.getpid()

    woken, wakes = socket.socketpair()
    with woken, wakes:
        woken.setblocking(False)
        wakes.setblocking(False)
        before = signal.set_wakeup_fd(wakes.fileno())
        try:
            assert report_of_core(signal_itself) != os.getpid()
        finally:
            signal.set_wakeup_fd(before)
        with pytest.raises(BlockingIOError):
            woken.recv(1)


def test_a_core_loads_the_plugins_again(vllm: SimpleNamespace) -> None:
    assert report_of_core(lambda: sys.modules["vllm"].plugins.plugins_loaded) is False
    assert vllm.plugins_loaded


def test_a_core_collects_none_of_the_service_s_objects() -> None:
    assert report_of_core(gc.get_freeze_count) > 0
    assert gc.get_freeze_count() == 0


def test_a_core_forked_by_a_pool_ends_cleanly() -> None:
    core = CoreContext().Process(target=int)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(core.start).result(DEADLINE_S)
    core.join(DEADLINE_S)
    assert core.exitcode == 0


def test_a_core_can_be_terminated_before_vllm_handles_signals() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        assert report_of_core(lambda: signal.getsignal(signal.SIGTERM)) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


FORK_AND_SLEEP = """
import sys, time
from types import ModuleType
sys.modules["vllm"] = ModuleType("vllm")
sys.modules["vllm"].plugins = ModuleType("plugins")
from services.rollout.engines.vllm_core import CoreContext
core = CoreContext().Process(target=time.sleep, args=(60,))
core.start()
print(core.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_core_that_cannot_be_forked_is_an_error() -> None:
    core = CoreContext().Process(target=int)
    core._Popen = no_memory
    with pytest.raises(RuntimeError, match="could not be forked"):
        core.start()


def test_a_core_that_hangs_at_its_start_ends_with_its_service() -> None:
    with subprocess.Popen([sys.executable, "-c", FORK_AND_SLEEP], stdout=subprocess.PIPE) as service:
        assert service.stdout is not None
        core = psutil.Process(int(service.stdout.readline()))
        service.kill()
    core.wait(DEADLINE_S)


SHARE_AND_KILL = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
from types import ModuleType
import psutil
sys.modules["vllm"] = ModuleType("vllm")
sys.modules["vllm"].plugins = ModuleType("plugins")
from services.rollout.engines.vllm_core import CoreContext

def share():
    memory = SharedMemory(create=True, size=1024)
    print(memory.name, flush=True)
    time.sleep(60)

core = CoreContext().Process(target=share)
core.start()
sys.stdin.readline()
for process in (*psutil.Process(core.pid).children(recursive=True), psutil.Process(core.pid)):
    process.kill()
"""


def test_shared_memory_of_a_killed_core_ends_with_its_service() -> None:
    command = [sys.executable, "-c", SHARE_AND_KILL]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        segment = Path("/dev/shm", service.stdout.readline().strip())
        assert segment.is_file()
        service.communicate("kill it\n", DEADLINE_S)
    wait_until(lambda: not segment.exists(), "the segment is removed", DEADLINE_S)


def test_a_core_computes_in_parallel_though_the_service_did() -> None:
    def add() -> float:
        torch.set_num_threads(2)
        return torch.ones(1 << 22).sum().item()

    assert add() == report_of_core(add)


def test_a_core_is_not_forked_during_a_large_import() -> None:
    context = CoreContext()
    core = context.Process(target=int)
    is_locked = []
    popen, core._Popen = core._Popen, lambda process: is_locked.append(IMPORTING.locked()) or popen(process)
    core.start()
    core.join(DEADLINE_S)
    assert is_locked == [True]
    assert not IMPORTING.locked()
