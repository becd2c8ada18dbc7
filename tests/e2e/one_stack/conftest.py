"""One stack for all tests of this folder: each has a job of its own on it. Its broker exports traces."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import RunningStack, running
from tests.otlp_receiver import Receiver


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-stack")


@pytest.fixture(scope="package")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="package")
def stack(folder: Path, receiver: Receiver) -> Iterator[RunningStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONBEAT_OTLP_ENDPOINT", receiver.url)
        with running(folder) as stack:
            yield stack
