"""One stack for all tests of this folder: each has a job of its own on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import RunningStack, running


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-stack")


@pytest.fixture(scope="package")
def stack(folder: Path) -> Iterator[RunningStack]:
    with running(folder) as stack:
        yield stack
