"""Probes of trainer and rollout: what they answer while all is well, while Redis is away, and when the loop hangs."""

import asyncio
import socket
import time

import httpx
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError

from onbeat.process import health as health_module
from onbeat.process.health import HealthSettings
from tests.conftest import free_port


class FakeRedis(Redis):
    def __init__(self) -> None:
        self.is_there = True

    async def ping(self, **_: object) -> bool:
        if not self.is_there:
            raise ConnectionError("refused")
        return True

    def __del__(self, *_: object) -> None: ...


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"TURN_S": 0.01, "PING_S": 0.2, "READY_S": 0.3, "LIVE_S": 5.0}.items():
        monkeypatch.setattr(health_module, name, seconds)


async def answers(port: int, path: str, status: int) -> str:
    """Wait until the answer has this status, and return its text."""
    deadline = time.monotonic() + 10
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        while (response := await client.get(path)).status_code != status:
            assert time.monotonic() < deadline, f"{path} still answers {response.status_code}: {response.text}"
            await asyncio.sleep(0.01)
    return response.text


async def test_ready_follows_redis_and_live_does_not(port: int) -> None:
    redis = FakeRedis()
    health = HealthSettings(metrics_port=port).serve_health()
    assert "Redis" in await answers(port, "/readyz", 503)
    assert "python_info" in await answers(port, "/metrics", 200)
    assert "/readyz" in await answers(port, "/", 404)
    watching = asyncio.create_task(health.watch(redis))
    try:
        await answers(port, "/readyz", 200)
        redis.is_there = False
        assert "Redis has not answered" in await answers(port, "/readyz", 503)
        await answers(port, "/livez", 200)
        redis.is_there = True
        await answers(port, "/readyz", 200)
    finally:
        watching.cancel()


async def test_a_loop_that_stands_still_is_not_alive(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "LIVE_S", 0.5)
    health = HealthSettings(metrics_port=port).serve_health()
    watching = asyncio.create_task(health.watch(FakeRedis()))
    await answers(port, "/livez", 200)
    time.sleep(0.6)  # noqa: ASYNC251  holds up the loop on purpose
    assert "stands still" in health.why_not_live()
    assert "stands still" in health.why_not_ready()
    await answers(port, "/livez", 200)
    watching.cancel()


def test_a_taken_port_is_reported_with_its_settings() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"ONBEAT_METRICS_PORT={number}.*another port"):
            HealthSettings(metrics_port=number).serve_health()
