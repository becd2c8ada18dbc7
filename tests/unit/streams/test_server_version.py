"""Services end with one sentence at a Redis that lacks commands they send, or is a cluster."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from onbeat.streams.connection import RedisUnfit, connect, describe_loss
from tests.conftest import own_redis


@asynccontextmanager
async def serving(info: str) -> AsyncIterator[str]:
    """Serve INFO with this text, or error, and all other commands with PONG; yield the URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while header := await reader.readline():
            words = [await read_word(reader) for _ in range(int(header[1:]))]
            text = f"${len(info)}\r\n{info}\r\n" if not info.startswith("-") else f"{info}\r\n"
            writer.write(text.encode() if words[0] == b"INFO" else b"+PONG\r\n")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        host, port = server.sockets[0].getsockname()
        yield f"redis://{host}:{port}"


async def read_word(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readline())[1:])
    return (await reader.readexactly(size + 2))[:-2]


@pytest.mark.parametrize("version", ["2.8.17", "5.0.14", "6.0.20"])
async def test_server_without_our_commands_is_refused_at_once(version: str) -> None:
    async with serving(f"# Server\r\nredis_version:{version}\r\nredis_mode:standalone\r\n") as url:
        redis = connect(url)
        started = time.monotonic()
        with pytest.raises(RedisUnfit) as caught:
            await redis.ping()
        assert time.monotonic() - started < 5.0  # it is not retried as a lost connection is
        where = url.removeprefix("redis://") + "/0"
        sentence = f"cannot be used: it is Redis {version}; Onbeat needs 6.2 or newer, or Valkey"
        assert describe_loss(redis, caught.value) == f"Redis at {where} {sentence}"
        await redis.aclose()


@pytest.mark.parametrize(
    "info",
    [
        "# Server\r\nredis_version:6.2.0\r\n",
        "# Server\r\nredis_version:255.255.255\r\n",  # built from source
        "# Server\r\nredis_version:7.2.4\r\nserver_name:valkey\r\nvalkey_version:8.1.3\r\n",
        "# Server\r\nproxy:1\r\n",
        "-NOPERM this user has no permissions to run the 'info' command",
    ],
)
async def test_server_that_may_be_new_enough_is_used(info: str) -> None:
    async with serving(info) as url, connect(url) as redis:
        assert await redis.ping()


@pytest.mark.parametrize("service", ["broker", "rollout", "trainer"])
@pytest.mark.parametrize(
    ("info", "words"),
    [
        ("redis_version:5.0.14\r\n", "cannot be used: it is Redis 5.0.14; Onbeat needs 6.2 or newer, or Valkey"),
        (
            "redis_version:7.0.15\r\nredis_mode:cluster\r\n",
            "cannot be used: it is a cluster, and Onbeat needs one",
        ),
    ],
)
async def test_service_ends_in_one_sentence(service: str, info: str, words: str, tmp_path: Path) -> None:
    deadline_s = 60.0
    command = [sys.executable, "-P", "-m", f"services.{service}"]
    environment = {"ONBEAT_LOG_FORMAT": "text", "ONBEAT_ENGINE": "transformers", "ONBEAT_DATA_DIR": str(tmp_path)}
    async with serving(f"# Server\r\n{info}") as url:
        run = partial(subprocess.run, command, env={**os.environ, **environment, "ONBEAT_REDIS_URL": url})
        ended = await asyncio.to_thread(run, capture_output=True, text=True, timeout=deadline_s)
    written = ended.stdout + ended.stderr
    assert ended.returncode == 1
    assert written.count(words) == 1
    assert "Traceback" not in written


async def test_real_cluster_is_refused_at_once(tmp_path: Path) -> None:
    with own_redis(tmp_path, more=("--cluster-enabled", "yes")) as url:
        redis = connect(url)
        with pytest.raises(RedisUnfit, match="it is a cluster") as caught:
            await redis.ping()
        where = url.removeprefix("redis://") + "/0"
        assert describe_loss(redis, caught.value).startswith(f"Redis at {where} cannot be used: it is a cluster, and")
        await redis.aclose()
