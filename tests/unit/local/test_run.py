"""`onbeat run`, `up` and `down` as a user runs them: real processes, real Redis, a broker that only pretends."""

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from onbeat.client import AsyncClient
from onbeat.config import JobConfig
from onbeat.local.run import JobRun
from onbeat.local.stack import TRAINER_GRACE_S
from onbeat.local.state import has_processes, running_stack
from onbeat.types import JobRecord
from tests.launcher import BLOCK_HANG_UP, TAKE_TERMINAL, launch
from tests.unit.fake_broker import FakeJobs, serve
from tests.waiting import wait_until

ROOT = Path(__file__).parents[3]
QUICKSTART = ROOT / "examples" / "quickstart.toml"

# The CLI with stand-ins for the services; also as the daemon of `up`, which it starts again in its own image.
STAND_IN = """
import os, sys, time
import onbeat.local.daemon, onbeat.local.stack, onbeat.terminal.live
onbeat.terminal.live.LOOK_S = 0.1
broker = [sys.executable, "-m", "tests.unit.fake_broker"]
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if "STAND_IN_IS_DEAF" in os.environ else ""
idle_code = "import tempfile, time; tempfile.mkdtemp(); print('idle', flush=True); time.sleep(300)"
idle = [sys.executable, "-c", deaf + idle_code]
onbeat.local.stack.service_command = lambda name: broker if name == "broker" else idle
if sys.argv[1] == "daemon":
    del sys.argv[1]
    sys.exit(onbeat.local.daemon.main())
onbeat.local.daemon.DAEMON_COMMAND = [sys.executable, __file__, "daemon"]
from onbeat.cli import main
main()
"""


@pytest.fixture
def cli(tmp_path: Path) -> list[str]:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    return [sys.executable, str(script)]


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def temporary() -> Iterator[Path]:
    """For temporary files; short, because sockets have to fit in."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def start(
    command: list[str], data_dir: Path, on_interrupt: signal.Handlers = signal.SIG_DFL, **env: str
) -> "subprocess.Popen[str]":
    """`on_interrupt`: how the shell that starts it has set SIGINT, whatever it is for these tests."""
    return subprocess.Popen(
        launch(command, f"signal.signal(signal.SIGINT, {on_interrupt:d})"),
        cwd=data_dir.parent,
        env={**os.environ, "ONBEAT_DATA_DIR": str(data_dir), "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=30)[0]


def processes_of(data_dir: Path) -> list[str]:
    """Command lines of processes whose environment names the data folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = os.fsencode(data_dir) in (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if is_ours and command:
            found.append(command)
    return found


def test_run_succeeds_writes_its_report_and_leaves_nothing(
    cli: list[str], data_dir: Path, tmp_path: Path, temporary: Path
) -> None:
    report = tmp_path / "report.json"
    arguments = ["run", str(QUICKSTART), "--rollouts", "2", "--set", "schedule.num_iterations=4"]
    process = start([*cli, *arguments, "--report", str(report)], data_dir, TMPDIR=str(temporary))
    out = finish(process)
    assert process.returncode == 0, out
    assert "iteration 4/4" in out
    assert "\x1b" not in out
    assert "/somewhere/checkpoint" in out
    assert len(json.loads(report.read_text())["iterations"]) == 4
    assert {path.name for path in (data_dir / "logs").iterdir()} == {
        f"{name}.log" for name in ("redis", "broker", "trainer", "rollout-0", "rollout-1")
    }
    assert processes_of(data_dir) == []
    assert not has_processes(data_dir)
    assert list(temporary.iterdir()) == []


INTERRUPTIONS = [
    (signal.SIGINT, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_IGN),  # started by a script, with `&`
]


def wait_for_job(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    while not process.stdout.readline().startswith("job job-1"):
        assert process.poll() is None


@pytest.mark.parametrize(("number", "on_interrupt"), INTERRUPTIONS)
def test_interrupted_run_pauses_the_job_and_leaves_nothing(
    cli: list[str], data_dir: Path, number: int, on_interrupt: signal.Handlers
) -> None:
    (data_dir / "jobs" / "job-1" / "checkpoints" / "iteration-000002").mkdir(parents=True)
    (data_dir / "jobs" / "job-1" / "checkpoints" / "iteration-000002" / "state.json").touch()
    process = start([*cli, "run", str(QUICKSTART)], data_dir, on_interrupt, FAKE_STEP_S="60")
    wait_for_job(process)
    process.send_signal(number)
    if number != signal.SIGINT:  # as `timeout` does, and a shell whose terminal is closed
        process.send_signal(number)
    out = finish(process)
    assert process.returncode == 130, out
    assert "stopping (Ctrl-C again to stop at once)" in out
    assert "job job-1 is PAUSED after 2 of 25 iterations: the same command continues it, --fresh begins anew" in out
    assert out.rstrip().endswith("checkpoints/iteration-000002")
    assert processes_of(data_dir) == []


def test_second_ctrl_c_kills_services_that_do_not_stop(cli: list[str], data_dir: Path) -> None:
    process = start([*cli, "run", str(QUICKSTART)], data_dir, FAKE_STEP_S="60", STAND_IN_IS_DEAF="1")
    wait_for_job(process)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("stopping"):
        assert process.poll() is None
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert "the same command continues where the job stands" in finish(process)
    assert time.monotonic() - started < TRAINER_GRACE_S / 4
    assert process.returncode == 130
    wait_until(lambda: processes_of(data_dir) == [], "nothing is left")


def test_ctrl_c_before_the_job_promises_no_job(cli: list[str], data_dir: Path) -> None:
    process = start([*cli, "run", str(QUICKSTART), "--rollouts", "2"], data_dir)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("starting"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert "broker, trainer and 2 rollouts in" in line
    assert "stopped; the same command starts the services again" in finish(process)
    assert process.returncode == 130


@pytest.mark.parametrize("is_signal_late", [False, True])
def test_closed_terminal_pauses_the_job(cli: list[str], data_dir: Path, is_signal_late: bool) -> None:
    """A write to a terminal that has gone may fail before its SIGHUP arrives, which is blocked here."""
    control, terminal = pty.openpty()
    preparations = [TAKE_TERMINAL, BLOCK_HANG_UP] if is_signal_late else [TAKE_TERMINAL]
    process = subprocess.Popen(
        launch([*cli, "run", str(QUICKSTART)], *preparations),
        cwd=data_dir.parent,
        env={**os.environ, "ONBEAT_DATA_DIR": str(data_dir), "PYTHONPATH": str(ROOT), "FAKE_STEP_S": "60"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""
    while b"job job-1" not in shown:
        shown += os.read(control, 1000)
    os.close(control)
    assert process.wait(timeout=30) == 130 or is_signal_late
    assert "POST /v1/jobs/job-1%3Apause" in (data_dir / "logs" / "broker.log").read_text()
    assert processes_of(data_dir) == []


def test_run_continues_its_own_job_and_begins_another_file_anew() -> None:
    fake, console = FakeJobs(), Console(file=io.StringIO(), width=200)
    config = JobConfig.from_file(QUICKSTART)
    changed = config.model_copy(update={"seed": 5})

    async def submit(url: str, config: JobConfig, *, is_fresh: bool = False) -> JobRecord:
        async with AsyncClient(url) as client:
            return await JobRun(url, config, [], None, console)._submit(client, is_fresh)

    def states() -> list[str]:
        return [fake.record(job_id)["state"] for job_id in fake.jobs]

    with serve(fake) as url, mock.patch("tests.unit.fake_broker.STEP_S", 60.0):
        assert asyncio.run(submit(url, config)).id == "job-1"
        fake.jobs["job-1"]["ended"] = "PAUSED"
        assert asyncio.run(submit(url, changed)).id == "job-2"
        assert states() == ["PAUSED", "RUNNING"]
        fake.jobs["job-2"]["ended"] = "PAUSED"
        assert asyncio.run(submit(url, config)).id == "job-1"
        assert states() == ["RUNNING", "PAUSED"]
        assert asyncio.run(submit(url, config, is_fresh=True)).id == "job-3"
        assert states() == ["CANCELLED", "PAUSED", "RUNNING"]
        assert asyncio.run(submit(url, changed, is_fresh=True)).id == "job-4"
        assert states() == ["CANCELLED", "CANCELLED", "CANCELLED", "RUNNING"]
        fake.jobs["job-4"]["ended"] = "CANCELLING"
        assert asyncio.run(submit(url, changed)).id == "job-5"
    printed = console.file.getvalue()
    assert "continuing job job-1 after 0 of 25 iterations (--fresh begins anew)" in printed
    assert "job job-1 (quickstart) has another job file and stays paused after 0 of 25 iterations: a new job" in printed


def test_up_serves_until_down_and_run_uses_it(cli: list[str], data_dir: Path) -> None:
    assert "up at http://127.0.0.1:" in finish(start([*cli, "up"], data_dir))
    state = running_stack(data_dir)
    assert state is not None
    assert "already up at" in finish(start([*cli, "up"], data_dir))
    out = finish(start([*cli, "run", str(QUICKSTART), "--set", "schedule.num_iterations=2"], data_dir))
    assert f"using the stack that is up at {state.url}" in out
    assert "job-1" in finish(start([*cli, "jobs", "list"], data_dir))  # found by the state file
    assert finish(start([*cli, "down"], data_dir)) == "stopped\n"
    wait_until(lambda: processes_of(data_dir) == [], "nothing is left")


def test_killed_stack_leaves_nothing_and_can_start_again(cli: list[str], data_dir: Path, temporary: Path) -> None:
    assert "up at" in finish(start([*cli, "up"], data_dir, TMPDIR=str(temporary)))
    (left,) = temporary.iterdir()
    wait_until(lambda: len(list(left.glob("*/tmp*"))) == 2, "both idle services have left something there")
    state = running_stack(data_dir)
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)
    wait_until(lambda: processes_of(data_dir) == [], "nothing is left")
    assert running_stack(data_dir) is None
    assert "up at" in finish(start([*cli, "up"], data_dir, TMPDIR=str(temporary)))
    assert not left.exists()
    assert finish(start([*cli, "down"], data_dir)) == "stopped\n"
    assert list(temporary.iterdir()) == []
