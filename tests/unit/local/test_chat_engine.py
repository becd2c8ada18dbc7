"""Checkpoints on this disk, and the engine that `onbeat chat` starts on them: with a stand-in for the engine."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.records import JobRecord
from onbeat.contracts.states import JobState
from onbeat.local import chat_engine as engine_module
from onbeat.local.chat_engine import EngineOptions, chat_engine
from onbeat.local.checkpoints import Checkpoint, model_before, newest_checkpoint, read_checkpoint
from onbeat.local.next_steps import next_steps, program, vllm_server
from onbeat.process.children import command_of
from tests.waiting import wait_until
from tests.world import job_body

ROOT = Path(__file__).parents[3]


def write_checkpoint(data_dir: Path, job_id: str, num_iterations: int = 2, **sections: object) -> Path:
    """Write what a chat reads of a checkpoint."""
    folder = data_dir / "jobs" / job_id / "checkpoints" / f"iteration-{num_iterations:06d}"
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}", encoding="utf-8")
    record = {"id": job_id, "config": job_body(**sections)}
    (folder / "onbeat_job.json").write_text(json.dumps(record), encoding="utf-8")
    state = {"state": {"policy_version": num_iterations}}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return folder


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ENDPOINT_COMMAND", command_of("tests.stand_in_endpoint"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def test_newest_complete_checkpoint_is_found_by_id_and_name(tmp_path: Path) -> None:
    for num_iterations in (2, 10):
        newest = write_checkpoint(tmp_path, "job-1", num_iterations, name="adder")
    (write_checkpoint(tmp_path, "job-1", 11) / "state.json").unlink()
    newest.with_name("iteration-000012-copy").mkdir()
    for target in ("job-1", "adder"):
        checkpoint = newest_checkpoint(tmp_path, target)
        assert checkpoint is not None
        assert (checkpoint.folder, checkpoint.name, checkpoint.policy_version) == (newest, "job-1", 10)
    assert newest_checkpoint(tmp_path, "job-2") is None
    write_checkpoint(tmp_path, "job-2", name="adder")
    with pytest.raises(OnbeatError, match=r"several jobs in .* are named adder: job-1, job-2; take an id"):
        newest_checkpoint(tmp_path, "adder")


def test_folder_without_a_job_is_a_plain_model(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "job-1")
    (folder / "onbeat_job.json").write_text('{"id": "job-1", "config": {"colour": "blue"}}', encoding="utf-8")
    assert read_checkpoint(folder) == Checkpoint(folder)
    assert Checkpoint(folder).name == "iteration-000002"
    with pytest.raises(OnbeatError, match="does not say which job wrote it"):
        model_before(Checkpoint(folder))


def test_model_before_is_the_one_that_the_job_began_with(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    write_checkpoint(tmp_path, "job-1", model={"path": str(base)})
    first = newest_checkpoint(tmp_path, "job-1")
    assert first is not None
    assert model_before(first) == str(base)
    fork = read_checkpoint(write_checkpoint(tmp_path, "job-2", 3, fork={"job": "job-1", "iteration": 2}))
    assert model_before(fork) == str(first.folder)
    hub = read_checkpoint(write_checkpoint(tmp_path, "job-3", model={"path": "org/name"}))
    assert model_before(hub) == "org/name"
    base.rmdir()
    with pytest.raises(OnbeatError, match="is not there any more; leave --compare out"):
        model_before(first)


# ---- the engine ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("stand_in")
def test_engine_that_fails_is_named_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, "job-1"))
    with pytest.raises(OnbeatError, match=r"(?s)chat exited with code 1 .*no weights in this model"):
        chat_engine(checkpoint, EngineOptions(), tmp_path).__enter__()


@pytest.mark.usefixtures("stand_in")
def test_engine_that_is_never_ready_ends_at_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_HANGS", "1")
    monkeypatch.setenv("ONBEAT_ENGINE_START_S", "0.1")
    monkeypatch.setattr(engine_module, "MARGIN_S", 0.1)
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, "job-1"))
    with pytest.raises(OnbeatError, match="chat is not ready after 0 s"):
        chat_engine(checkpoint, EngineOptions(), tmp_path).__enter__()


PARENT = """
import sys, time
from pathlib import Path
from onbeat.local import chat_engine as engine
from onbeat.local.checkpoints import read_checkpoint
from onbeat.process.children import command_of
engine.ENDPOINT_COMMAND = command_of("tests.stand_in_endpoint")
with engine.chat_engine(read_checkpoint(Path(sys.argv[1])), engine.EngineOptions(), Path(sys.argv[2])):
    print("ready", flush=True)
    time.sleep(300)
"""


def test_engine_dies_with_a_killed_chat(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "job-1")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", PARENT, str(folder), str(tmp_path)]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    assert commands_with(tmp_path)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not commands_with(tmp_path), "the engine has ended", deadline_s=30)


def commands_with(folder: Path) -> list[bytes]:
    """Return the command lines of stand-ins that name the folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it has just ended
            continue
        if os.fsencode(folder) in command and b"stand_in_endpoint" in command:
            commands.append(command)
    return commands


# ---- after a run -----------------------------------------------------------------------------------------------------


def job_record(job_id: str) -> JobRecord:
    times = {"created_at": time.time(), "num_iterations": 2}
    return JobRecord(id=job_id, name="adder", pool="default", state=JobState.SUCCEEDED, config={}, **times)


def test_lines_after_a_run_work_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.local.next_steps.find_spec", lambda name: name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ONBEAT_DATA_DIR", raising=False)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    data_dir = tmp_path / ".onbeat"
    folder = write_checkpoint(data_dir, "job-1")
    steps = dict(next_steps(job_record("job-1"), data_dir))
    assert steps["talk to it"] == "onbeat chat job-1"
    assert steps["compare"] == "onbeat chat job-1 --compare"
    assert steps["see the run"] == "onbeat view"
    assert steps["send it"] == "onbeat report job-1"
    assert steps["take it"] == str(folder)
    assert steps["give it away"] == "onbeat export job-1"
    assert steps["serve it"] == f"{vllm_server()} .onbeat/jobs/job-1/checkpoints/iteration-000002"
    elsewhere = dict(next_steps(job_record("job-1"), data_dir.rename(tmp_path / "my data")))
    assert elsewhere["talk to it"] == "onbeat chat job-1 --data-dir 'my data'"
    assert elsewhere["see the run"] == "onbeat view 'my data'"
    kept_up = dict(next_steps(job_record("job-2"), tmp_path / "my data", "http://127.0.0.1:8800"))
    seen, sent = "http://127.0.0.1:8800/#/jobs/job-2", "onbeat report job-2 --data-dir 'my data'"
    assert kept_up == {"see the run": seen, "send it": sent}


def test_server_is_the_one_that_the_installed_vllm_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    monkeypatch.setattr("onbeat.local.next_steps.distribution", lambda name: name)
    assert vllm_server() == "vllm serve"

    def miss(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("onbeat.local.next_steps.distribution", miss)
    monkeypatch.setattr("onbeat.local.next_steps.find_spec", lambda name: name)
    assert vllm_server() == "python -m vllm.entrypoints.openai.api_server --model"
    monkeypatch.setattr("onbeat.local.next_steps.find_spec", lambda name: None)
    assert vllm_server() == ""


def test_program_off_the_path_is_named_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(Path(sys.executable).parent)
    assert program("python") == "./python"
    monkeypatch.chdir("/")
    assert program("python") == str((Path(sys.executable).parent / "python").relative_to("/"))
