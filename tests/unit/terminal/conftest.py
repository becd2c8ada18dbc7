import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from onbeat.cli import main
from tests.unit.fake_broker import FakeJobs, serve

Command = Callable[..., Any]


@pytest.fixture
def fake() -> FakeJobs:
    return FakeJobs()


@pytest.fixture
def url(fake: FakeJobs, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The broker that commands ask."""
    with serve(fake) as url:
        monkeypatch.setenv("ONBEAT_URL", url)
        yield url


@pytest.fixture
def onbeat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `onbeat ARGUMENTS` in this process, check its exit code, and return what it printed: `out` and `err`."""

    def run(*arguments: str, code: int = 0) -> Any:
        monkeypatch.setattr(sys, "argv", ["onbeat", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert (ended.value.code or 0) == code, printed.err
        return printed

    return run
