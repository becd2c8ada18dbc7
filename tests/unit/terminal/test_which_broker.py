"""The broker that a command asks; tests/unit/client/test_client.py has the same for Python, test_run.py has records."""

import getpass
from pathlib import Path
from types import SimpleNamespace

import pytest

from onbeat.local.state import StackLock, create_data_dir
from onbeat.process.stacks import StackState
from tests.broker_thread import BrokerThread
from tests.unit.terminal.conftest import Command

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Go to a folder without a stack, where nothing answers at the default address; return its data folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("ONBEAT_URL", "ONBEAT_DATA_DIR", "ONBEAT_REDIS_URL", "ONBEAT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("onbeat.process.brokers.DEFAULT_URL", NOBODY)
    monkeypatch.setattr("onbeat.client.transport.RETRY_DELAYS_S", ())
    return tmp_path / ".onbeat"


def run_stack(folder: Path, command: str, url: str) -> StackLock:
    """Be the stack of a data folder whose broker is at an address."""
    create_data_dir(folder)
    lock = StackLock(folder)
    lock.write(StackState(1, command, url, "redis://127.0.0.1:1", 0.0))
    return lock


def test_named_address_goes_before_the_stack_of_the_folder(
    onbeat: Command, broker: BrokerThread, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = run_stack(folder, "up", NOBODY)
    onbeat("jobs", "list", "--url", broker.url)
    monkeypatch.setenv("ONBEAT_URL", broker.url)
    onbeat("jobs", "list")
    onbeat("jobs", "list", "--data-dir", str(folder), "--url", broker.url)
    assert NOBODY in onbeat("jobs", "list", "--data-dir", str(folder), code=1).err  # an option outranks a variable
    monkeypatch.delenv("ONBEAT_URL")
    assert NOBODY in onbeat("jobs", "list", code=1).err
    lock.release()


def test_stack_of_the_folder_goes_before_the_default_address(
    onbeat: Command, broker: BrokerThread, folder: Path, job_file: str
) -> None:
    lock = run_stack(folder, "run", broker.url)
    job_id = onbeat("jobs", "create", job_file).out.strip()
    assert onbeat("jobs", "cancel", job_id).err == ""
    lock.release()


def test_default_address_is_read_and_says_whose_it_is(
    onbeat: Command, broker: BrokerThread, folder: Path, job_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onbeat.process.brokers.DEFAULT_URL", broker.url)
    owner = f"the stack of {broker.folder.resolve()}, run by user {getpass.getuser()}"
    monkeypatch.setenv("ONBEAT_API_KEY", "secret")
    assert onbeat("jobs", "list").err == f"no stack runs in {folder}; reading from {broker.url}, {owner}\n"
    assert broker.wire.authorization is None
    monkeypatch.setenv("ONBEAT_DATA_DIR", str(folder))  # as services have it
    onbeat("jobs", "list")
    line = "  export ONBEAT_URL="
    for words in (
        ["jobs", "create", job_file],
        ["data", "push", job_file],
        ["data", "delete", "x"],
        ["jobs", "pause", "job-1"],
        ["jobs", "fork", "job-1", "--from", "1"],
        ["chat", "job-1", "hi"],
    ):
        error = onbeat(*words, code=2).err
        assert f"no stack runs in {folder}: start one with `onbeat up`. {broker.url} is {owner}" in error
        assert error.splitlines()[-1].startswith(line)
    assert "No broker was asked about model, data and reward: no stack runs" in onbeat("validate", job_file).out
    assert {method for method, _ in broker.wire.requests} == {"GET"}


def test_refused_key_is_sent_only_to_a_named_address(
    onbeat: Command, broker: BrokerThread, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onbeat.process.brokers.DEFAULT_URL", broker.url)
    monkeypatch.setenv("ONBEAT_API_KEY", "secret")
    broker.wire.failures = [401] * 2  # the probe, too: then it does not say whose it is
    error = onbeat("jobs", "list", code=1).err
    assert f"reading from {broker.url}, which does not say whose stack it is" in error
    assert "ONBEAT_API_KEY is sent only to an address that was named:\n  export ONBEAT_URL=" in error


def test_records_of_the_folder_are_opened_to_be_read(
    onbeat: Command, broker: BrokerThread, folder: Path, job_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def open_records(data_dir: Path) -> SimpleNamespace:
        calls.append(f"open {data_dir}")
        return SimpleNamespace(url=broker.url, close=lambda: calls.append("close"))

    monkeypatch.setattr("onbeat.process.records.OpenRecords", open_records)
    (folder / "redis").mkdir(parents=True)
    for words in (["jobs", "list"], ["doctor"], ["top", "--once"]):
        assert onbeat(*words).err.startswith(f"no stack runs in {folder}; reading its records")
    assert calls == [f"open {folder}", "close"] * 3
    calls.clear()
    for words in (["jobs", "create", job_file], ["jobs", "resume", "job-1"], ["data", "push", job_file]):
        error = f"error: no stack runs in {folder}: start one with `onbeat up`, or name a broker with --url or "
        assert onbeat(*words, code=2).err.startswith(error)
    assert "keys and values are right" in onbeat("validate", job_file).out
    assert calls == []
    job_id = broker.create_job()
    error = onbeat("jobs", "watch", job_id, code=1).err
    assert f"{job_id} is PENDING after 0 of 3 iterations, and nothing runs here: `onbeat up` starts" in error


def test_records_that_another_command_opened_are_shared(
    onbeat: Command, broker: BrokerThread, folder: Path, job_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = SimpleNamespace(url=broker.url, close=lambda: None)
    monkeypatch.setattr("onbeat.process.records.OpenRecords", lambda _: records)
    lock = run_stack(folder, "view", broker.url)
    assert onbeat("jobs", "list").err == ""
    error = onbeat("jobs", "create", job_file, code=2).err
    assert error.endswith("end it (`onbeat down`), then start one with `onbeat up`\n")
    assert "keys and values are right. No broker was asked" in onbeat("validate", job_file).out
    lock.release()
    lock = run_stack(folder, "view", NOBODY)  # it ends between the look at its state and the question
    monkeypatch.setattr("onbeat.cli.options.wait_until", lambda condition, _: lock.release() or condition())
    onbeat("jobs", "list")


def test_given_folder_without_anything_is_refused(onbeat: Command, folder: Path, tmp_path: Path) -> None:
    given = str(tmp_path / "my data")
    replay = ["replay", "job-1", "--iteration", "2"]
    for command, code in ((["jobs", "list"], 1), (["jobs", "cancel", "job-1"], 1), (replay, 2)):
        error = onbeat(*command, "--data-dir", given, code=code).err
        assert error.startswith(f"error: no stack runs in {given}")
        assert f"`onbeat up --data-dir '{given}'`" in error
    assert "no stack runs" in onbeat("down", "--data-dir", given).out


def test_stack_that_does_not_come_up_is_not_waited_for_long(
    onbeat: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onbeat.process.brokers.STARTING_S", 0.0)
    create_data_dir(folder)
    lock = StackLock(folder)
    assert f"a stack in {folder} is just starting or ending" in onbeat("jobs", "list", code=1).err
    lock.release()


def test_up_names_the_variable_that_leads_elsewhere(
    onbeat: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StackState(1, "up", NOBODY, "", 0.0)
    monkeypatch.setattr("onbeat.local.daemon.start_in_background", lambda _: state)
    assert onbeat("up").out.splitlines()[1] == f"up at {NOBODY} (data folder {folder}); `onbeat down` stops it"
    monkeypatch.setenv("ONBEAT_URL", "http://127.0.0.1:2")
    last = "commands ask ONBEAT_URL=http://127.0.0.1:2 all the same: unset it, and they ask this stack"
    assert onbeat("up").out.splitlines()[2:] == [last]
