"""`onbeat chat` of jobs that are over, without a broker or beside one: with a stand-in for the engine."""

import io
import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from onbeat.contracts.states import JobState
from onbeat.local import chat_engine as engine_module
from onbeat.process.children import command_of
from onbeat.process.stacks import StackState
from onbeat.streams.keys import JobKeys
from tests.broker_thread import BrokerThread
from tests.unit.local.test_chat_engine import ROOT, write_checkpoint
from tests.unit.terminal.conftest import Command


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an own data folder, with the stand-in for engines and no broker that anything leads to."""
    monkeypatch.setattr(engine_module, "ENDPOINT_COMMAND", command_of("tests.stand_in_endpoint"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("ONBEAT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("ONBEAT_URL", raising=False)
    monkeypatch.setattr("onbeat.client.DEFAULT_URL", "http://127.0.0.1:9")
    return tmp_path / "data"


def test_finished_job_keeps_a_conversation_without_a_broker(
    onbeat: Command, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(data_dir, "job-1")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    printed = onbeat("chat", "job-1")
    assert printed.out == "job-1 heard 1: one\njob-1 heard 3: two\n"
    assert "starting an engine for " in printed.err
    assert not engine_processes(data_dir)


def test_engine_that_dies_ends_the_conversation(
    onbeat: Command, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(data_dir, "job-1")
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ndie\ntwo\n"))
    printed = onbeat("chat", "job-1", code=1)
    assert printed.out == "job-1 heard 1: one\n"
    assert "the engine exited with code 3; last lines of " in printed.err


def test_comparison_asks_the_model_before_and_then_after(onbeat: Command, data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write_checkpoint(data_dir, "job-1", model={"path": str(tmp_path / "base")})
    printed = onbeat("chat", "job-1", "2 + 2", "--compare")
    assert printed.out == "before: before heard 1: 2 + 2\nafter:  job-1 heard 1: 2 + 2\n"


def test_model_folder_needs_no_job(onbeat: Command, data_dir: Path, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "job-1")
    (folder / "onbeat_job.json").unlink()
    printed = onbeat("chat", str(folder), "hi")
    assert printed.out == "iteration-000002 heard 1: hi\n"
    assert "no job is recorded there" in printed.err
    wrong = onbeat("chat", f"{tmp_path}/jobs", "hi", code=1).err
    assert "is no folder with a model: config.json and *.safetensors are to be in it" in wrong


def test_view_of_the_folder_does_not_take_chats(
    onbeat: Command, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(data_dir, "job-1")
    view = StackState(1, "view", "http://127.0.0.1:9", "", time.time())
    monkeypatch.setattr("onbeat.process.brokers.running_stack", lambda _: view)
    assert onbeat("chat", "job-1", "hi").out == "job-1 heard 1: hi\n"


@pytest.mark.usefixtures("data_dir")
@pytest.mark.parametrize("message", [["hi"], []])
def test_unknown_job_is_an_error_without_a_terminal(
    onbeat: Command, monkeypatch: pytest.MonkeyPatch, message: list[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    refused = onbeat("chat", "hi", *message, code=2)
    assert "no job 'hi' has a checkpoint here, and no stack runs in " in refused.err


def test_job_that_is_over_elsewhere_names_its_folder(
    onbeat: Command, broker: BrokerThread, data_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONBEAT_URL", broker.url)
    job_id = broker.create_job()
    broker.run(broker.ledger.jobs.move(job_id, JobState.CANCELLED))
    assert "has no checkpoint, so there is no model to talk to" in onbeat("chat", job_id, "hi", code=1).err
    broker.run(broker.ledger.redis.hset(JobKeys(job_id).job, "checkpoint", "/elsewhere/iteration-000002"))
    refused = onbeat("chat", job_id, "hi", code=1).err
    assert "/elsewhere/iteration-000002 on the trainer's machine: copy that folder to this one" in refused
    write_checkpoint(data_dir, job_id)
    assert onbeat("chat", job_id, "hi").out == f"{job_id} heard 1: hi\n"
    assert "there is no job 'job-0'" in onbeat("chat", "job-0", "hi", code=1).err


def test_local_job_is_found_where_the_named_broker_has_none(
    onbeat: Command, broker: BrokerThread, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(data_dir, "job-1", name="adder")
    for url in (broker.url, "http://127.0.0.1:9"):
        monkeypatch.setenv("ONBEAT_URL", url)
        assert onbeat("chat", "adder", "hi").out == "job-1 heard 1: hi\n"
    assert "--port is the port of --serve" in onbeat("chat", "adder", "--port", "8801", code=2).err
    assert "leave the message out" in onbeat("chat", "adder", "hi", "--serve", code=2).err


def test_running_job_is_neither_served_nor_compared(onbeat: Command, broker: BrokerThread, job_id: str) -> None:
    for option in ("--serve", "--compare"):
        assert "need a job that is over" in onbeat("chat", job_id, option, code=1).err


def test_served_model_has_a_line_to_copy(onbeat: Command, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(data_dir, "job-1")

    def interrupt(running: engine_module.ChatEngine) -> None:
        running.check()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine_module, "wait_for_end", interrupt)
    monkeypatch.setattr("onbeat.local.run.terminations_as_interrupts", nullcontext)
    serving, curl, ended = onbeat("chat", "job-1", "--serve").out.splitlines()
    address = serving.split()[3]
    assert serving == f"serving job-1 at {address} without keys, to this machine; Ctrl-C ends it"
    assert curl.startswith(f"curl {address.rstrip(',')}/chat/completions -H 'Content-Type: application/json' -d '")
    assert json.loads(curl.split("-d ")[1].strip("'"))["model"] == "job-1"
    assert ended == "ended"


def engine_processes(data_dir: Path) -> list[str]:
    """Return the processes whose environment names the data folder, but this one."""
    named = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_ours = str(data_dir).encode() in path.read_bytes()
        except OSError:  # it has just ended, or is another user's
            continue
        if is_ours:
            named.append(path.parent.name)
    return named
