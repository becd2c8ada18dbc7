"""The local stack with stand-ins for the services: what starts, what restarts, and that nothing survives."""

import copy
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from onbeat.client.datasets import take_local_files
from onbeat.config import JobConfig
from onbeat.contracts.errors import OnbeatError
from onbeat.local.daemon import start_in_background, stop_in_background
from onbeat.local.redis_choice import RedisServer
from onbeat.local.redis_server import checked_port, free_port, redis_service
from onbeat.local.stack import StackOptions, describe_places, make_scratch, plan_of, service_specs, stack_at_usual_port
from onbeat.local.state import StackLock, create_data_dir
from onbeat.local.supervisor import ServiceEnd, ServiceSpec, StackFailed, Supervisor, inherited_environment
from onbeat.machine.cores import CorePlan, format_cores, parse_cores, plan_cores
from onbeat.machine.malloc import KEEP_FREED
from onbeat.machine.processor import read_processor
from onbeat.process.stacks import OWNER_LOCK, StackState, has_processes, is_locked, running_stack
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples"

# A service with a child in its own group and a grandchild that ran off into another session; their ids go to argv[1].
FAMILY = """
import os, subprocess, sys, tempfile, time
tempfile.mkdtemp()
sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
near, far = subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)
open(sys.argv[1] + ".new", "w").write(f"{os.getpid()} {near.pid} {far.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(300)
"""
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + FAMILY


def family(pids_file: Path, code: str = FAMILY, **options: float) -> ServiceSpec:
    command = [sys.executable, "-c", code, str(pids_file)]
    return ServiceSpec("family", command, 0, missing=lambda: "" if pids_file.exists() else "no ids", **options)


def pids_in(pids_file: Path) -> list[int]:
    wait_until(pids_file.exists, "it runs")
    return [int(pid) for pid in pids_file.read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it ends between opening the file and reading it
        return False


@pytest.fixture
def pids_file(tmp_path: Path) -> Path:
    return tmp_path / "pids"


@pytest.fixture
def reports() -> list[str]:
    return []


@pytest.fixture
def ends() -> list[ServiceEnd]:
    return []


@pytest.fixture
def supervisor(
    tmp_path: Path, reports: list[str], ends: list[ServiceEnd], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Supervisor]:
    """It restarts what died at once, and is stopped at the end."""
    monkeypatch.setattr("onbeat.local.supervisor.FIRST_DELAY_S", 0.001)
    supervisor = Supervisor(tmp_path, reports.append, [], tmp_path / "scratch", ends.append)
    yield supervisor
    supervisor.stop()


# ---- nothing survives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [FAMILY, DEAF], ids=["polite", "ignores SIGTERM"])
def test_stop_leaves_no_child_or_grandchild(supervisor: Supervisor, pids_file: Path, code: str) -> None:
    supervisor.start([family(pids_file, code, grace_s=0.3)])
    pids = pids_in(pids_file)
    assert all(map(is_alive, pids))
    supervisor.stop()
    assert not any(map(is_alive, pids))
    supervisor.stop()


def test_dead_service_leaves_nothing_and_is_restarted(supervisor, reports, ends, pids_file, tmp_path, monkeypatch):
    supervisor.start([replace(family(pids_file), process="family-0", run_variable="ONBEAT_RUN_ID")])
    (family_0,) = supervisor.services
    run = family_0.run
    assert f"ONBEAT_RUN_ID={run}".encode() in Path(f"/proc/{family_0.guard.pid}/environ").read_bytes()
    monkeypatch.setattr("onbeat.local.supervisor.num_oom_kills", lambda: 1 << 60)
    (left,) = (tmp_path / "scratch" / "family").iterdir()  # the temporary files of the service are there
    before = pids_in(pids_file)
    pids_file.unlink()
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: supervisor.check() or pids_file.exists(), "it runs again")
    assert not any(map(is_alive, before))
    assert all(map(is_alive, pids_in(pids_file)))
    how = "family-0 was killed by SIGKILL by the kernel, as memory ran out here; restart 1 of 4"
    assert reports[0].startswith(how)
    assert ends == [ServiceEnd("family-0", run, 128 + signal.SIGKILL, reports[0])]
    assert family_0.run not in ("", run), "each start has an id of its own"
    assert [path == left for path in (tmp_path / "scratch" / "family").iterdir()] == [False]


# As an engine does: a child has shared memory, which a third process is to remove. Its name goes to argv[1]. Linux cuts
# the child's own name after 15 bytes, here in the middle of a letter.
SHARING = """
import multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory
def share(path):
    open("/proc/self/comm", "w").write("x" * 14 + "\u044f")
    segment = SharedMemory(create=True, size=1000)
    open(path + ".new", "w").write(segment.name)
    os.rename(path + ".new", path)
    time.sleep(300)
if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=share, args=(sys.argv[1],)).start()
    time.sleep(300)
"""


def test_killed_service_leaves_no_shared_memory(supervisor: Supervisor, tmp_path: Path) -> None:
    script, notes = tmp_path / "sharing.py", tmp_path / "notes"
    script.write_text(SHARING)
    command = [sys.executable, str(script), str(notes)]
    supervisor.start([ServiceSpec("s", command, 0, missing=lambda: "" if notes.exists() else "its name")])
    segment = Path("/dev/shm") / notes.read_text()
    assert segment.exists()
    (service,) = psutil.Process(supervisor.services[0].guard.pid).children()
    service.kill()
    wait_until(lambda: supervisor.services[0].guard.poll() is not None, "it has ended")
    assert not segment.exists()


def test_service_dies_with_its_guard(supervisor: Supervisor, pids_file: Path) -> None:
    supervisor.start([family(pids_file)])
    service, near, far = pids_in(pids_file)
    os.kill(supervisor.services[0].guard.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(service), "the kernel has ended it", 30)
    wait_until(lambda: supervisor.check() or not is_alive(near), "its child has ended")
    os.kill(far, signal.SIGKILL)  # only the guard could have found it


def test_guard_reports_the_exit_under_a_launcher_without_sigchld() -> None:
    """A process that ignores SIGCHLD passes that on to those that it starts."""
    guard = ["-P", "-m", "onbeat.process.guard", str(os.getpid()), "1", "sh", "-c", "exit 3"]
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-c", ignore, sys.executable, *guard]
    assert subprocess.run(command, start_new_session=True, timeout=30).returncode == 3


@pytest.mark.parametrize("is_stopping", [False, True])
def test_sigkilled_parent_leaves_nothing(tmp_path: Path, pids_file: Path, is_stopping: bool) -> None:
    """Also when its services were just given a minute to stop, as `docker stop` and systemd do."""
    code = f"""
import sys, time
from pathlib import Path
from onbeat.local.supervisor import ServiceEnd, ServiceSpec, Supervisor
command = [sys.executable, "-c", {DEAF if is_stopping else FAMILY!r}, {str(pids_file)!r}]
folder = Path({str(tmp_path)!r})
Supervisor(folder, print, [], folder / "scratch").start([ServiceSpec("family", command, 0, grace_s=60)])
time.sleep(300)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    pids = pids_in(pids_file)
    if is_stopping:
        psutil.Process(pids[0]).parent().terminate()
        time.sleep(0.5)  # the guard has heard it, and waits for its service
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(map(is_alive, pids)), "all have ended", 30)


# ---- starting and restarting -----------------------------------------------------------------------------------


def test_services_start_together_and_stop_wave_by_wave(supervisor: Supervisor, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    code = """
import signal, sys, time
def note(what): open(sys.argv[1], "a").write(what + sys.argv[2] + "\\n")
def end(*_): note("-"); sys.exit()
signal.signal(signal.SIGTERM, end); note("+"); time.sleep(300)
"""

    def missing() -> str:
        return "" if journal.exists() and len(journal.read_text().split()) == 2 else "the lines of both"

    def spec(wave: int) -> ServiceSpec:
        return ServiceSpec(f"s{wave}", [sys.executable, "-c", code, str(journal), str(wave)], wave, missing=missing)

    supervisor.start([spec(1), spec(2)])
    supervisor.stop()
    assert sorted(journal.read_text().split()[:2]) == ["+1", "+2"]
    assert journal.read_text().split()[2:] == ["-2", "-1"]


def test_service_that_does_not_start_or_stay_is_given_up(supervisor, reports, monkeypatch):
    monkeypatch.setattr("onbeat.local.supervisor.MAX_RESTARTS", 2)
    dying = ServiceSpec("s", [sys.executable, "-c", "print('no such device'); raise SystemExit(3)"], 0)
    with pytest.raises(StackFailed, match=r"(?s)s exited with code 3 while starting.*no such device"):
        supervisor.start([replace(dying, missing=lambda: "never")])
    supervisor.stop()
    supervisor.start([dying])
    with pytest.raises(StackFailed, match=r"(?s)s exited with code 3, after 2 restarts.*no such device"):
        wait_until(supervisor.check, "it is given up")
    assert len(reports) == 2
    supervisor.stop()
    with pytest.raises(StackFailed, match=r"not ready after 0 s: port closed"):
        supervisor.start([ServiceSpec("s", ["sleep", "60"], 0, missing=lambda: "port closed", ready_deadline_s=0.1)])


# ---- the stack's own services ----------------------------------------------------------------------------------


def test_redis_starts_with_a_password_on_loopback_and_keeps_data(
    supervisor: Supervisor, tmp_path: Path, redis_server: RedisServer
) -> None:
    from redis import Redis
    from redis.exceptions import AuthenticationError

    folder = tmp_path / os.fsdecode(b'an "odd" \\ name, \xff')  # not UTF-8 either
    for expected in (None, b"kept"):
        spec, url = redis_service(folder, redis_server)
        supervisor.start([spec])
        client = Redis.from_url(url)
        assert client.get("k") == expected
        client.set("k", b"kept")
        assert client.config_get("bind")["bind"] == "127.0.0.1"
        with pytest.raises(AuthenticationError):
            Redis.from_url(url.replace("redis://:", "redis://:wrong")).ping()
        supervisor.stop()
    assert (folder / "redis" / "redis.conf").stat().st_mode & 0o077 == 0


def test_services_get_the_addresses_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONBEAT_WEIGHTS_RELAY", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    options = StackOptions(tmp_path, num_rollouts=2, engine="transformers", rollout_cores=[0], trainer_cores=[0])
    broker, trainer, *rollouts = service_specs(options, "redis://r", 8801)
    common = {"ONBEAT_REDIS_URL": "redis://r", "ONBEAT_POOL": "default", "ONBEAT_LOG_FORMAT": "text"}
    common |= {"GOMP_SPINCOUNT": "10000"}  # the cores are shared
    data_dir = {"ONBEAT_DATA_DIR": str(tmp_path)}
    broker_variables = {"ONBEAT_HOST": "127.0.0.1", "ONBEAT_PORT": "8801", "ONBEAT_INSTANCE_ID": broker.missing.args[1]}
    assert broker.env == common | data_dir | broker_variables
    assert trainer.env.items() >= {**common, **data_dir, "ONBEAT_CPU_CORES": "0"}.items()
    assert [spec.env["ONBEAT_WORKER_ID"] for spec in rollouts] == ["rollout-0", "rollout-1"]
    assert {spec.env["ONBEAT_ENGINE"] for spec in rollouts} == {"transformers"}
    # Both are read when a process is started, or gRPC imported: a forked engine core has them only from here.
    assert {spec.env["GLIBC_TUNABLES"] for spec in (trainer, *rollouts)} == {KEEP_FREED}
    assert {spec.env["GRPC_ENABLE_FORK_SUPPORT"] for spec in rollouts} == {"0"}
    assert broker.wave < trainer.wave == rollouts[0].wave
    assert {spec.env["ONBEAT_WEIGHTS_RELAY"] for spec in rollouts} == {"True"}
    _, _, alone = service_specs(StackOptions(tmp_path), "redis://r", 8801)
    assert alone.env["ONBEAT_WEIGHTS_RELAY"] == "False"  # it has no peers


def test_port_that_cannot_be_bound_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.local.redis_server.HOST", "192.0.2.1")  # as for a port below 1024, the reason varies
    with pytest.raises(ValueError, match="--port 8800: Cannot assign requested address; take another port"):
        checked_port(8800)


def test_port_that_is_lost_is_replaced_unless_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[socket.socket] = []

    @contextmanager
    def start(options: StackOptions, *_: object) -> Iterator[tuple[str, None]]:
        if not taken:  # another process binds it after we have looked
            taken.append(socket.create_server(("127.0.0.1", options.port)))
            raise StackFailed("the stack did not start")
        yield f"http://127.0.0.1:{options.port}", None

    monkeypatch.setattr("onbeat.local.stack.local_stack", start)
    monkeypatch.setattr("onbeat.local.stack.DEFAULT_PORT", usual := free_port())
    lines: list[str] = []
    with stack_at_usual_port(StackOptions(tmp_path), "run", lines.append) as (url, _):
        assert not url.endswith(f":{usual}")
    assert lines == [f"another process was faster at port {usual}: starting again at another one"]
    taken.pop().close()
    asked_for = stack_at_usual_port(StackOptions(tmp_path, port=usual), "run", lines.append)
    with pytest.raises(StackFailed, match="did not start"):
        asked_for.__enter__()
    taken[0].close()
    with stack_at_usual_port(StackOptions(tmp_path), "run", lines.append) as (url, _):
        assert url.endswith(f":{usual}")


def test_broker_of_another_stack_does_not_pass_for_our_own(supervisor, tmp_path, broker, redis_url):
    port = int(broker.url.rpartition(":")[2])
    with pytest.raises(StackFailed, match=r"(?s)broker exited with code 3 while starting.*or set ONBEAT_PORT"):
        supervisor.start(service_specs(StackOptions(tmp_path, is_view=True), redis_url, port))


def test_variables_of_services_elsewhere_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stack sets a key of the weights itself, and its services would refuse a file beside it, or share a port."""
    for name in ("WEIGHTS_API_KEY_FILE", "WEIGHTS_PORT", "WEIGHTS_ADVERTISE", "WEIGHTS_TLS_CA", "METRICS_PORT"):
        monkeypatch.setenv(f"ONBEAT_{name}", "1")
    monkeypatch.setenv("ONBEAT_KV_CACHE_GIB", "2")
    inherited = inherited_environment()
    assert inherited["ONBEAT_KV_CACHE_GIB"] == "2"
    assert not [name for name in inherited if name.startswith(("ONBEAT_WEIGHTS", "ONBEAT_METRICS"))]


@pytest.mark.parametrize(
    ("devices", "build", "places"),
    [
        (None, "2.13.0+cpu", "PROCESSOR: trainer on cores 2-3, rollout-0 on cores 0-1"),
        ("3,5", "2.13.0", "accelerators 3, 5: trainer on 3, rollout-0 on 5"),
        ("0", "2.13.0+cpu", "; an NVIDIA device is here, too, for which `make setup PLATFORM=cuda` is needed"),
    ],
)
def test_run_begins_with_what_it_computes_on(tmp_path, monkeypatch, devices, build, places):
    monkeypatch.setattr("onbeat.local.stack.available_cores", lambda: [0, 1, 2, 3])
    monkeypatch.setattr("onbeat.local.stack.physical_cores", lambda cores: cores)
    monkeypatch.setattr("onbeat.machine.accelerators.version", lambda package: build)
    monkeypatch.setenv("ONBEAT_DEVICE", "auto" if devices else "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices or "")
    assert describe_places(StackOptions(tmp_path)).endswith(places.replace("PROCESSOR", str(read_processor())))


def test_hardware_threads_of_a_core_are_not_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other half of the numbers are the second threads of the same cores on most machines."""
    monkeypatch.setattr("onbeat.local.stack.available_cores", lambda: list(range(16)))
    monkeypatch.setattr("onbeat.local.stack.physical_cores", lambda cores: cores[:8])
    options = StackOptions(tmp_path)
    assert plan_of(options) == CorePlan([[0, 1, 2, 3]], [4, 5, 6, 7])
    assert plan_of(replace(options, trainer_cores=[8, 9])) == CorePlan([list(range(8))], [8, 9])
    with pytest.raises(ValueError, match="core 16 is not available; this process may use 0-15"):
        plan_of(replace(options, rollout_cores=[16]))


def test_a_container_with_few_cpus_shares_its_many_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.local.stack.available_cores", lambda: list(range(16)))
    monkeypatch.setattr("onbeat.local.stack.physical_cores", lambda cores: cores)
    monkeypatch.setattr("onbeat.local.stack.cpu_quota", lambda: 2.0)
    assert plan_of(StackOptions(tmp_path)) == CorePlan([list(range(16))], list(range(16)))
    monkeypatch.setattr("onbeat.local.stack.cpu_quota", lambda: 4.0)
    assert not plan_of(StackOptions(tmp_path)).is_shared


def test_data_dir_is_locked_by_one_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.local.state.OWNER_DEADLINE_S", 0.1)
    create_data_dir(tmp_path)
    assert running_stack(tmp_path) is None
    lock = StackLock(tmp_path)
    state = StackState(os.getpid(), "up", "http://u", "redis://r", 1.0)
    lock.write(state)
    assert running_stack(tmp_path) == state
    assert (tmp_path / "stack.json").stat().st_mode & 0o077 == 0
    with pytest.raises(OnbeatError, match="already running"):
        StackLock(tmp_path)
    lock.write(replace(state, machine="another", host="another-host"))
    with pytest.raises(OnbeatError, match="runs elsewhere, on another-host or in a container: stop it there"):
        stop_in_background(tmp_path)  # it would end a process of ours with that id
    lock.write(state)
    monkeypatch.setattr("onbeat.local.daemon.os.kill", Mock(side_effect=PermissionError(1, "not permitted")))
    with pytest.raises(OnbeatError, match="is another user's; the user who started it has to stop it"):
        stop_in_background(tmp_path)
    lock.release()
    assert running_stack(tmp_path) is None
    assert not has_processes(tmp_path)


def test_second_stack_leaves_the_log_of_the_first(tmp_path: Path) -> None:
    create_data_dir(tmp_path)
    log = tmp_path / "logs" / "stack.log"
    log.write_text("of the first")
    lock = StackLock(tmp_path)  # it is still starting
    with pytest.raises(OnbeatError, match="already running"):
        start_in_background(StackOptions(tmp_path))
    lock.release()
    assert log.read_text() == "of the first"


def test_two_starts_at_the_same_moment_share_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, time; time.sleep(1); sys.exit('end of ' + sys.argv[1])"
    monkeypatch.setattr("onbeat.local.daemon.DAEMON_COMMAND", [sys.executable, "-c", code])
    with ThreadPoolExecutor(2) as threads:
        starts = [threads.submit(start_in_background, StackOptions(tmp_path, port=port)) for port in (8801, 8802)]
    assert all("the stack did not start:" in str(start.exception()) for start in starts)
    log = (tmp_path / "logs" / "stack.log").read_text()
    assert ('"port": 8801' in log, '"port": 8802' in log) == (True, True)


def test_wrong_value_ends_a_start_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(OnbeatError, match="core 99999 is not available") as caught:
        start_in_background(StackOptions(tmp_path, rollout_cores=[99999]))
    assert "Traceback" not in str(caught.value)


def test_a_look_at_a_lock_does_not_pass_for_its_owner(tmp_path: Path) -> None:
    StackLock(tmp_path).release()

    def count_owners() -> int:
        return sum(has_processes(tmp_path) for _ in range(2000))

    with ThreadPoolExecutor(2) as threads:
        lookers = [threads.submit(count_owners) for _ in range(2)]
    assert [looker.result() for looker in lookers] == [0, 0]


def test_stack_waits_for_the_last_child_of_a_killed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = StackLock(tmp_path)
    killed.write(StackState(os.getpid(), "up", "http://u", "redis://r", 1.0))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[killed.children_fd])
    killed._children.close()
    killed._owner.close()
    assert running_stack(tmp_path) is None
    assert has_processes(tmp_path)
    monkeypatch.setattr("onbeat.local.state.LEFTOVERS_DEADLINE_S", 0.1)
    monkeypatch.setattr("onbeat.local.daemon.LEFTOVERS_DEADLINE_S", 0.1)
    with pytest.raises(OnbeatError, match="services of a killed stack in"):
        StackLock(tmp_path)
    with pytest.raises(OnbeatError, match="is just starting or ending"):
        stop_in_background(tmp_path)
    monkeypatch.setattr("onbeat.local.state.LEFTOVERS_DEADLINE_S", 10.0)
    monkeypatch.setattr("onbeat.local.daemon.LEFTOVERS_DEADLINE_S", 10.0)
    with ThreadPoolExecutor(2) as threads:
        stopping = threads.submit(stop_in_background, tmp_path)
        starting = threads.submit(StackLock, tmp_path)
        wait_until(lambda: is_locked(tmp_path / OWNER_LOCK), "the next stack waits for the child")
        wait_until(lambda: running_stack(tmp_path) is None, "it does not pass for the killed one", 5)
        child.communicate(b"\n")
        starting.result().release()
        assert stopping.result() is False


# ---- cores -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "num_rollouts", "given", "rollouts", "trainer"),
    [
        ([0], 1, {}, [[0]], [0]),
        ([0, 1], 2, {}, [[0], [1]], [0, 1]),
        ([0, 1, 2, 3], 1, {}, [[0, 1]], [2, 3]),
        ([2, 3, 5, 7, 8, 9], 2, {}, [[2, 3], [5]], [7, 8, 9]),
        ([0, 1, 2, 3], 1, {"rollout_cores": [3]}, [[3]], [0, 1, 2]),
        ([0, 1, 2, 3], 2, {"trainer_cores": [0]}, [[1, 2], [3]], [0]),
    ],
)
def test_first_half_generates_or_few_cores_do_both(cores, num_rollouts, given, rollouts, trainer):
    assert plan_cores(cores, num_rollouts, **given) == CorePlan(rollouts, trainer)


def test_core_lists_read_and_written() -> None:
    assert parse_cores("6,0-3") == [0, 1, 2, 3, 6]
    assert format_cores([0, 1, 2, 3, 6]) == "0-3,6"
    for wrong in ("", "a", "3-1", "1-", "-1", "1,,2"):
        with pytest.raises(ValueError, match="list of cores"):
            parse_cores(wrong)


# ---- temporary files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [38, 39])
def test_paths_of_sockets_among_temporary_files_are_short_enough(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    outer = Path(tempfile.mkdtemp(dir="/tmp"))
    parent = outer / ("x" * (length - len(f"{outer}/")))
    parent.mkdir()
    reports: list[str] = []
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        folder = make_scratch(reports.append)
        with socket.socket(socket.AF_UNIX) as listener:
            (folder.path / "rollout-999").mkdir()
            listener.bind(str(folder.path / "rollout-999" / str(uuid.uuid4())))
        folder.remove()
    finally:
        shutil.rmtree(outer)
    monkeypatch.setattr(tempfile, "tempdir", "/proc")
    with pytest.raises(OnbeatError, match=r"no temporary folder can be made in /proc: .*space there or set TMPDIR"):
        make_scratch(reports.append)
    is_long = length > 38
    assert folder.path.parent == (Path("/tmp") if is_long else parent)
    assert [str(parent) in report for report in reports] == [True] * is_long


# ---- a job's data file -----------------------------------------------------------------------------------------


def test_data_files_beside_the_job_are_named_by_content(tmp_path: Path) -> None:
    held_out = ["evaluation.data.type=jsonl", "evaluation.data.path=arithmetic.jsonl"]
    job = JobConfig.from_file(EXAMPLES / "from_jsonl.toml", held_out).model_dump(mode="json")
    again = copy.deepcopy(job)
    files = take_local_files(job, EXAMPLES, tmp_path)
    assert [file.source for file in files] == [EXAMPLES / "arithmetic.jsonl"] * 2
    assert job["data"]["path"] == job["evaluation"]["data"]["path"] == files[0].path
    assert files[0].name == f"arithmetic-{files[0].sha256[:16]}.jsonl"
    take_local_files(again, EXAMPLES, tmp_path)
    assert JobConfig.model_validate(again) == JobConfig.model_validate(job)


def test_data_file_that_is_nowhere_is_named_before_the_start(tmp_path: Path) -> None:
    job = JobConfig.from_file(EXAMPLES / "from_jsonl.toml").model_dump(mode="json")
    with pytest.raises(ValueError, match=r"data\.path: there is no file .*relative to the job file"):
        take_local_files(job, tmp_path, tmp_path / "data")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "arithmetic.jsonl").touch()  # the broker's data file
    assert take_local_files(job, tmp_path, tmp_path / "data") == []
