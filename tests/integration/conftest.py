"""Fixtures that tests of several areas use."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from onbeat.streams.ledger import Ledger
from tests.broker_fixtures import running_broker
from tests.integration.authority import Authority


@pytest_asyncio.fixture
async def broker(ledger: Ledger, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run a whole broker, whose data folder is `tmp_path`, and yield a client."""
    async with running_broker(ledger, tmp_path) as client:
        yield client


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki") / "ours")


@pytest.fixture
def pool() -> str:
    """Tests share one Redis: the heartbeats of another test are not to be seen here."""
    return f"pool-{uuid.uuid4().hex[:8]}"
