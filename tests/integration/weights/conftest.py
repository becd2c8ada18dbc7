"""A trainer and its rollouts, on machines of their own as far as they can tell."""

from collections.abc import Iterator

import pytest

from onbeat.weights import server as server_module
from tests.weight_plane import Plane, hosts_apart


@pytest.fixture(autouse=True, scope="module")
def apart() -> Iterator[None]:
    with hosts_apart():
        yield


@pytest.fixture
def small_messages(monkeypatch):
    """So that a small payload is many messages."""
    monkeypatch.setattr(server_module, "CHUNK_BYTES", 64 << 10)


@pytest.fixture
async def plane():
    async with Plane() as plane:
        yield plane
