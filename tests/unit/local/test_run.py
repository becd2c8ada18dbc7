"""`onbeat run`, `up` and `down` as a user runs them: real processes, Redis and broker, and no model."""

import asyncio
import errno
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest
from rich.console import Console

from onbeat.client import AsyncClient
from onbeat.config import JobConfig
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.states import JobState
from onbeat.local import daemon
from onbeat.local.run import INTERRUPTED, JobRun, RunConsole, run_or_pause, terminations_as_interrupts
from onbeat.local.stack import TRAINER_GRACE_S
from onbeat.process.stacks import has_processes, running_stack, state_path
from tests.broker_thread import BrokerThread
from tests.launcher import BLOCK_HANG_UP, TAKE_TERMINAL, launch
from tests.scripted_trainer import CHECKPOINT
from tests.waiting import wait_until
from tests.world import World, job_body

pytestmark = pytest.mark.slow
ENDLESS = ("--set", "schedule.num_iterations=1000")  # the job is not over before it is paused, on no machine

ROOT = Path(__file__).parents[3]

# The CLI with stand-ins for trainer and rollouts; also as the daemon of `up`, which it starts again in its own image.
STAND_IN = """
import os, sys, time
import onbeat.local.daemon, onbeat.local.stack, onbeat.terminal.live
onbeat.terminal.live.LOOK_S = 0.1
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " if "STAND_IN_IS_DEAF" in os.environ else ""
begin = deaf + "import runpy, tempfile, time; tempfile.mkdtemp(); "
broker = [sys.executable, "-m", "services.broker"]
trainer = [sys.executable, "-c", begin + "runpy.run_module('tests.scripted_trainer', run_name='__main__')"]
rollout = [sys.executable, "-c", begin + "print('idle', flush=True); time.sleep(300)"]
onbeat.local.stack.service_command = {"broker": broker, "trainer": trainer, "rollout": rollout}.get
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
    """Make a folder for temporary files with a short path, because paths of sockets are limited."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def start(
    command: list[str], data_dir: Path, on_interrupt: signal.Handlers = signal.SIG_DFL, **env: str
) -> "subprocess.Popen[str]":
    """Start a command. `on_interrupt` is the handling of SIGINT that it inherits, as from a shell."""
    return subprocess.Popen(
        launch(command, f"signal.signal(signal.SIGINT, {on_interrupt:d})"),
        cwd=data_dir.parent,
        env={**os.environ, "ONBEAT_DATA_DIR": str(data_dir), "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    return process.communicate(timeout=60)[0]


def processes_of(data_dir: Path) -> list[str]:
    """Command lines of processes whose environment names the data folder."""
    commands = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = os.fsencode(data_dir) in (folder / "environ").read_bytes()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if is_ours and command:
            commands.append(command)
    return commands


def test_run_succeeds_writes_its_report_and_leaves_nothing(
    cli: list[str], job_file: str, data_dir: Path, tmp_path: Path, temporary: Path
) -> None:
    report = tmp_path / "report.json"
    arguments = ["run", job_file, "--rollouts", "2", "--set", "schedule.num_iterations=4"]
    process = start([*cli, *arguments, "--report", str(report)], data_dir, TMPDIR=str(temporary))
    out = finish(process)
    assert process.returncode == 0, out
    assert "iteration 4/4" in out
    assert "\x1b" not in out
    assert CHECKPOINT in out
    assert re.search(r"\nsee the run +\S*onbeat view\n", out)
    written = json.loads(report.read_text())
    assert len(written["iterations"]) == 4
    assert "(4 iterations): http://127.0.0.1:" in out
    assert f"/#/jobs/{written['job_id']}\n" in out  # the address of its page
    assert {path.name for path in (data_dir / "logs").iterdir()} == {
        f"{name}.log" for name in ("redis", "broker", "trainer", "rollout-0", "rollout-1")
    }
    assert processes_of(data_dir) == []
    audited = finish(start([*cli, "audit", written["job_id"]], data_dir, ONBEAT_URL=""))
    assert audited.startswith(f"no stack runs in {data_dir}; reading its records, which takes some seconds\nclean: ")
    assert processes_of(data_dir) == []
    assert not has_processes(data_dir)
    assert list(temporary.iterdir()) == []


def wait_for_job(process: "subprocess.Popen[str]") -> str:
    """Wait until the job runs; return its id."""
    assert process.stdout is not None
    job_id = ""
    while "RUNNING" not in (line := process.stdout.readline()):
        assert process.poll() is None
        job_id = line.split()[1] if line.startswith("job job-") else job_id
    return job_id


@pytest.mark.parametrize(
    ("number", "on_interrupt"),
    [
        (signal.SIGINT, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGTERM, signal.SIG_IGN),  # started by a script, with `&`
    ],
)
def test_interrupted_run_pauses_the_job_and_leaves_nothing(
    cli: list[str], job_file: str, data_dir: Path, number: int, on_interrupt: signal.Handlers
) -> None:
    process = start([*cli, "run", job_file], data_dir, on_interrupt, SCRIPTED_STEP_S="60")
    job_id = wait_for_job(process)
    checkpoint = data_dir / "jobs" / job_id / "checkpoints" / "iteration-000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").touch()
    process.send_signal(number)
    if number != signal.SIGINT:  # as `timeout` does, and a shell whose terminal is closed
        process.send_signal(number)
    out = finish(process)
    assert process.returncode == 130, out
    assert "stopping (Ctrl-C again to stop at once)" in out
    assert f"job {job_id} is PAUSED after 2 of 25 iterations: the same command continues it, --fresh begins anew" in out
    assert out.rstrip().endswith("checkpoints/iteration-000002")
    assert processes_of(data_dir) == []


def test_termination_lets_the_running_callback_end() -> None:
    """A KeyboardInterrupt in the middle of `Popen.poll` had left its lock taken, and the run never ended."""
    steps = []

    async def be_terminated() -> None:
        signal.raise_signal(signal.SIGTERM)
        steps.append("the callback ends")
        await asyncio.sleep(60)
        steps.append("the wait goes on")

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in the background of a script
    try:
        with terminations_as_interrupts(), pytest.raises(KeyboardInterrupt):
            asyncio.run(be_terminated())
    finally:
        signal.signal(signal.SIGINT, before)
    assert steps == ["the callback ends"]


def test_daemon_that_is_asked_to_stop_ends_its_check_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps = []

    def check() -> None:
        signal.raise_signal(signal.SIGTERM)
        steps.append("the check ends")

    monkeypatch.setattr(daemon, "stack_at_usual_port", lambda *_, **__: nullcontext(("http://here", Mock(check=check))))
    monkeypatch.setattr(sys, "argv", ["daemon", json.dumps({"data_dir": str(tmp_path)})])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert daemon.main() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert steps == ["the check ends"]


def test_second_ctrl_c_kills_services_that_do_not_stop(cli: list[str], job_file: str, data_dir: Path) -> None:
    process = start([*cli, "run", job_file], data_dir, SCRIPTED_STEP_S="60", STAND_IN_IS_DEAF="1")
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


class SignalsItsEnd:
    """An object that gets Ctrl-C while it is freed. There Python prints an exception, and goes on."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class FreesWhenWritten(io.StringIO):
    def write(self, text: str) -> int:
        SignalsItsEnd()  # freed at once
        return super().write(text)


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """Handle SIGINT as Python does. Tests that run in the background of a script have inherited that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_second_ctrl_c_counts_while_an_object_is_freed() -> None:
    run, supervisor = Mock(run=AsyncMock(side_effect=KeyboardInterrupt), pause=AsyncMock()), Mock()
    with terminations_as_interrupts():
        assert run_or_pause(run, False, supervisor, RunConsole(file=FreesWhenWritten())) == INTERRUPTED
    assert supervisor.hurry.called
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_ctrl_c_before_the_job_promises_no_job(cli: list[str], job_file: str, data_dir: Path) -> None:
    process = start([*cli, "run", job_file, "--rollouts", "2"], data_dir)
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith("starting"):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert "broker, trainer and 2 rollouts in" in line
    assert "stopped; the same command starts the services again" in finish(process)
    assert process.returncode == 130


@pytest.mark.parametrize("is_signal_late", [False, True])
def test_closed_terminal_pauses_the_job(cli: list[str], job_file: str, data_dir: Path, is_signal_late: bool) -> None:
    """A write to a terminal that has gone may fail before its SIGHUP arrives, which is blocked here."""
    control, terminal = pty.openpty()
    # A dumb terminal gets lines, and no view that is left out where there is no terminal.
    preparations, term = ([TAKE_TERMINAL, BLOCK_HANG_UP], "dumb") if is_signal_late else ([TAKE_TERMINAL], "xterm")
    env = {"ONBEAT_DATA_DIR": str(data_dir), "PYTHONPATH": str(ROOT), "SCRIPTED_STEP_S": "1", "TERM": term}
    process = subprocess.Popen(
        launch([*cli, "run", job_file, *ENDLESS], *preparations),
        cwd=data_dir.parent,
        env=os.environ | env,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    shown = b""
    while b"RUNNING" not in shown:
        shown += os.read(control, 1000)
    os.close(control)
    assert process.wait(timeout=60) == 130 or is_signal_late
    assert ":pause status=200" in (data_dir / "logs" / "broker.log").read_text()
    assert processes_of(data_dir) == []


def test_closed_pipe_pauses_the_job(cli: list[str], job_file: str, data_dir: Path) -> None:
    process = start([*cli, "run", job_file, *ENDLESS], data_dir, SCRIPTED_STEP_S="1")
    wait_for_job(process)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert ":pause status=200" in (data_dir / "logs" / "broker.log").read_text()
    assert processes_of(data_dir) == []


def test_run_continues_its_own_job_and_begins_another_file_anew(broker: BrokerThread) -> None:
    console, jobs = Console(file=io.StringIO(), width=200), broker.ledger.jobs
    config = JobConfig.model_validate(job_body())
    changed = config.model_copy(update={"seed": 5})

    async def submit(config: JobConfig, *, is_fresh: bool = False) -> str:
        async with AsyncClient(broker.url) as client:
            return (await JobRun(broker.url, config, [], None, console)._submit(client, is_fresh)).id

    def begin(config: JobConfig, *, is_fresh: bool = False) -> str:
        """Submit a job that is new, and be its trainer."""
        job_id = asyncio.run(submit(config, is_fresh=is_fresh))
        broker.run(World(broker.ledger).start_training(job_id))
        return job_id

    def states() -> list[JobState]:
        return [broker.run(jobs.state(job_id)) for job_id in broker.run(jobs.ids())]

    paused = begin(config)
    broker.run(jobs.move(paused, JobState.PAUSED))
    other = begin(changed)
    assert states() == ["PAUSED", "RUNNING"]
    broker.run(jobs.move(other, JobState.PAUSED))
    assert asyncio.run(submit(config)) == paused
    assert states() == ["RUNNING", "PAUSED"]
    begin(config, is_fresh=True)
    assert states() == ["CANCELLING", "PAUSED", "RUNNING"]
    newest = begin(changed, is_fresh=True)
    assert states() == ["CANCELLING", "CANCELLING", "CANCELLING", "RUNNING"]
    broker.run(jobs.move(newest, JobState.CANCELLING))
    begin(changed)
    printed = console.file.getvalue()
    assert f"continuing job {paused} after 0 of 3 iterations (--fresh begins anew)" in printed
    assert f"job {paused} (test) has another job file and stays paused after 0 of 3 iterations: a new job" in printed


@pytest.mark.usefixtures("trainer")
def test_report_that_cannot_be_written_hides_no_result(
    broker: BrokerThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    console = Console(file=io.StringIO(), width=200)
    monkeypatch.setattr("pathlib.Path.replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    run = JobRun(broker.url, JobConfig.model_validate(job_body()), [], tmp_path / "report.json", console)
    with pytest.raises(OnbeatError, match=r"report\.json cannot be written: No space left on device"):
        asyncio.run(run.run(is_fresh=False, check=None))
    assert "audit       clean: " in console.file.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_up_serves_until_down_and_run_uses_it(cli: list[str], job_file: str, data_dir: Path) -> None:
    assert "up at http://127.0.0.1:" in finish(start([*cli, "up"], data_dir))
    state = running_stack(data_dir)
    assert state is not None
    out = finish(start([*cli, "up", "--rollouts", "2"], data_dir))
    assert out.startswith("already up at")
    assert "with its own rollouts, engine, cores and port: to change them, stop it first (`onbeat down`)" in out
    path = state_path(data_dir)
    path.write_text(path.read_text().replace('"up"', '"view"'))
    assert "`onbeat view` uses the data folder" in finish(start([*cli, "up"], data_dir))
    path.write_text(path.read_text().replace('"view"', '"up"'))
    out = finish(start([*cli, "run", job_file, "--set", "schedule.num_iterations=2"], data_dir))
    assert f"using the stack that is up at {state.url}" in out
    assert "SUCCEEDED" in finish(start([*cli, "jobs", "list"], data_dir))  # found by the state file
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
