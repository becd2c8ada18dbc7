"""`onbeat run`, `up` and `down` as a user runs them: real processes, real Redis, a broker that only pretends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from onbeat.local.state import has_processes, running_stack

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.toml"

# The CLI with stand-ins for the services; also as the daemon of `up`, which it starts again in its own image.
STAND_IN = """
import sys, time
import onbeat.local.daemon, onbeat.local.stack, onbeat.terminal.live
onbeat.terminal.live.LOOK_S = 0.1
broker = [sys.executable, "-m", "tests.unit.fake_broker"]
idle = [sys.executable, "-c", "import tempfile, time; tempfile.mkdtemp(); print('idle', flush=True); time.sleep(300)"]
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
        command,
        cwd=data_dir.parent,
        env={**os.environ, "ONBEAT_DATA_DIR": str(data_dir), "PYTHONPATH": str(ROOT), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, on_interrupt),
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


def wait_until_gone(data_dir: Path) -> None:
    deadline = time.monotonic() + 15
    while processes_of(data_dir) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(data_dir) == []


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


@pytest.mark.parametrize(("number", "on_interrupt"), INTERRUPTIONS)
def test_interrupted_run_cancels_the_job_and_leaves_nothing(
    cli: list[str], data_dir: Path, number: int, on_interrupt: signal.Handlers
) -> None:
    process = start([*cli, "run", str(QUICKSTART)], data_dir, on_interrupt, FAKE_STEP_S="60")
    assert process.stdout is not None
    while not process.stdout.readline().startswith("job job-1"):
        assert process.poll() is None
    process.send_signal(number)
    out = finish(process)
    assert process.returncode == 130, out
    assert "cancelling job job-1" in out
    assert "job job-1 is CANCELLED" in out
    assert processes_of(data_dir) == []


def test_broker_that_does_not_start_is_explained(cli: list[str], data_dir: Path) -> None:
    process = start([*cli, "run", str(QUICKSTART)], data_dir, FAKE_STEP_S="not a number")
    out = finish(process)
    assert process.returncode == 1
    assert "error: broker exited with code 1 while starting; last lines of" in out
    assert "could not convert string to float: 'not a number'" in out
    assert processes_of(data_dir) == []


def test_up_serves_until_down_and_run_uses_it(cli: list[str], data_dir: Path) -> None:
    assert "up at http://127.0.0.1:" in finish(start([*cli, "up"], data_dir))
    state = running_stack(data_dir)
    assert state is not None
    assert "already up at" in finish(start([*cli, "up"], data_dir))
    out = finish(start([*cli, "run", str(QUICKSTART), "--set", "schedule.num_iterations=2"], data_dir))
    assert f"using the stack that is up at {state.url}" in out
    assert "job-1" in finish(start([*cli, "jobs", "list"], data_dir))  # found by the state file
    assert finish(start([*cli, "down"], data_dir)) == "stopped\n"
    wait_until_gone(data_dir)


def test_killed_stack_leaves_nothing_and_can_start_again(cli: list[str], data_dir: Path, temporary: Path) -> None:
    finish(start([*cli, "up"], data_dir, TMPDIR=str(temporary)))
    (left,) = temporary.iterdir()
    wait_for_litter(left)
    state = running_stack(data_dir)
    assert state is not None
    os.kill(state.pid, signal.SIGKILL)
    wait_until_gone(data_dir)
    assert running_stack(data_dir) is None
    assert "up at" in finish(start([*cli, "up"], data_dir, TMPDIR=str(temporary)))
    assert not left.exists()
    assert finish(start([*cli, "down"], data_dir)) == "stopped\n"
    assert list(temporary.iterdir()) == []


def wait_for_litter(folder: Path) -> None:
    """Until both idle services have left something among their temporary files."""
    deadline = time.monotonic() + 15
    while len(list(folder.glob("*/tmp*"))) < 2:
        assert time.monotonic() < deadline, f"in vain: {list(folder.rglob('*'))}"
        time.sleep(0.05)
