import io
import sys
from collections.abc import Callable
from typing import Any

import pytest

from onbeat.cli import main
from onbeat.contracts.records import Finding
from services.broker.doctor.diagnosis import diagnosis
from tests.broker_thread import BrokerThread

Command = Callable[..., Any]


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def job_id(broker: BrokerThread) -> str:
    """Create a job of three iterations and return its id."""
    return broker.create_job()


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    """Return all findings of the broker's doctor."""
    shown: list[Finding] = []
    monkeypatch.setattr("services.broker.doctor.diagnosis.diagnosis", lambda _, verdict="": diagnosis(shown, verdict))
    return shown


@pytest.fixture
def onbeat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `onbeat ARGUMENTS` in this process, check its exit code, and return what it printed: `out` and `err`."""

    monkeypatch.setattr("onbeat.terminal.live.LOOK_S", 0.1)

    def run(*arguments: str, code: int = 0) -> Any:
        monkeypatch.setattr(sys, "argv", ["onbeat", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed.err
        return printed

    return run


@pytest.fixture
def trained(onbeat: Command, job_id: str, trainer: None) -> str:
    """Return the job when it has succeeded."""
    onbeat("jobs", "watch", job_id)
    return job_id
