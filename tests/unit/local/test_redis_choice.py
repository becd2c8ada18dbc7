"""Choice of the Redis that the local stack starts: no server begins empty beside data that it cannot read."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from onbeat.contracts.errors import OnbeatError
from onbeat.local.redis_choice import (
    FOLDER_OF_7,
    OLDEST_ON_PATH,
    Release,
    choose_server,
    parse_version,
    release_of_data,
    servers_on_path,
    write_record,
)
from onbeat.local.redis_server import redis_service
from onbeat.local.stack import StackOptions, local_stack
from onbeat.local.supervisor import Supervisor
from onbeat.process.stacks import running_stack
from tests.conftest import EMBEDDED, NO_NEW_SERVER

Install = Callable[[str, str], Path]


def release(text: str) -> Release:
    kind, version = text.split()
    return Release(kind, parse_version(version))


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a script of this name on the PATH, which holds nothing else."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def add(name: str, line: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
        return path

    return add


@pytest.fixture
def newest_path() -> str:
    """Return the PATH as it is, or skip where it has no recent server."""
    if not servers_on_path():
        pytest.skip(NO_NEW_SERVER)
    return os.environ["PATH"]


@pytest.fixture
def stored(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], Any]:
    """Start the server that is chosen for the data folder with this PATH, and count its starts in the data."""

    def start_with(data_dir: Path, path: str) -> tuple[int, int]:
        monkeypatch.setenv("PATH", path)
        with started(supervisor, data_dir) as client:
            major = int(client.info("server")["redis_version"].partition(".")[0])
            return client.incr("starts"), major

    return start_with


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path, lambda _: None, [], tmp_path / "scratch")
    yield supervisor
    supervisor.stop()


@contextmanager
def started(supervisor: Supervisor, data_dir: Path) -> Iterator[Any]:
    spec, url = redis_service(data_dir, choose_server(data_dir / "redis"))
    supervisor.start([spec])
    with Redis.from_url(url) as client:
        yield client
    supervisor.stop()


# ---- the choice ------------------------------------------------------------------------------------------------


def test_newest_server_is_chosen_by_its_answer(install: Install, tmp_path: Path) -> None:
    install("redis-server", "echo 'Redis server v=7.2.4 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=1'")
    path = install("valkey-server", "echo 'Valkey server v=8.1.3 sha=00000000:0 malloc=jemalloc-5.3.0'")
    assert str(choose_server(tmp_path)) == f"Valkey 8.1.3 ({path})"
    install("valkey-server", "echo 'Server v=7.2.12 sha=00000000:0'")  # Valkey 7.2 leaves its name out
    assert str(choose_server(tmp_path)) == f"Valkey 7.2.12 ({path})"
    path = install("redis-server", "echo 'Valkey server v=10.0.0 sha=00000000:0'")  # a link for old scripts
    assert str(choose_server(tmp_path)) == f"Valkey 10.0.0 ({path})"


@pytest.mark.parametrize(
    "line",
    [
        "echo 'Redis server v=6.2.14 sha=00000000:0'",
        "echo 'Redis server v=7.0.15 sha=00000000:0'; exit 1",
        "echo 'no such library' >&2; exit 127",
        "echo 'KeyDB server v=7.3.4'",
        "exec /bin/sleep 60",
        "",
    ],
)
def test_embedded_server_is_the_last_resort(install, tmp_path, monkeypatch, line):
    monkeypatch.setattr("onbeat.local.redis_choice.VERSION_DEADLINE_S", 0.5)
    monkeypatch.setattr("onbeat.local.redis_choice.embedded_server", lambda: [EMBEDDED])
    install("redis-server", line)
    server = choose_server(tmp_path)
    assert server == EMBEDDED
    assert str(server) == "Redis 6.2.14 of 2023, embedded; redis-server 7 or newer on the PATH is preferred"


def test_server_that_reads_the_data_goes_before_a_newer_one(install: Install, tmp_path: Path) -> None:
    path = install("redis-server", "echo 'Redis server v=7.4.2 sha=00000000:0'")
    install("valkey-server", "echo 'Valkey server v=9.0.0 sha=00000000:0'")
    (tmp_path / FOLDER_OF_7).mkdir()
    write_record(tmp_path, release("Redis 7.4.1"))
    assert choose_server(tmp_path).path == str(path)


@pytest.mark.parametrize(
    ("server", "data", "can_read"),
    [
        ("Redis 7.0.15", "Redis 6.2", True),
        ("Redis 7.4.0", "Redis 7.0.15", True),
        ("Redis 7.0.15", "Redis 7.0.15", True),
        ("Redis 7.0.15", "Redis 7.2.0", False),
        ("Redis 6.2.14", "Redis 7.0", False),
        ("Valkey 7.2.5", "Redis 6.2", True),
        ("Valkey 8.0.1", "Redis 7.2.4", True),
        ("Valkey 9.0.0", "Redis 7.4.0", False),
        ("Valkey 8.1.0", "Redis 8.0.0", False),
        ("Valkey 9.0.0", "Valkey 8.1.3", True),
        ("Valkey 8.1.3", "Valkey 9.0.0", False),
        ("Redis 8.2.0", "Valkey 7.2.5", False),
    ],
)
def test_newer_release_reads_older_data_of_its_kind(server: str, data: str, can_read: bool) -> None:
    assert release(server).can_read(release(data)) == can_read


# ---- whose data a folder holds ---------------------------------------------------------------------------------


def test_folder_without_a_record_is_known_by_its_files(tmp_path: Path) -> None:
    assert release_of_data(tmp_path / "new") is None
    (tmp_path / "appendonly.aof").touch()
    assert release_of_data(tmp_path) == release("Redis 6.2")
    write_record(tmp_path, release("Redis 7.0.15"))  # a server that then did not start
    assert release_of_data(tmp_path) == release("Redis 6.2")
    (tmp_path / "appendonly.aof").rename(tmp_path / "moved")
    (tmp_path / FOLDER_OF_7).mkdir()
    assert release_of_data(tmp_path) == release("Redis 7.0.15")
    for damaged in (
        "",
        "[]",
        '{"kind": "Redis"}',
        '{"kind": "Redis", "version": "x"}',
        '{"kind": "Redis", "version": 7}',
    ):
        (tmp_path / "server.json").write_text(damaged)
        assert release_of_data(tmp_path) == Release("Redis", OLDEST_ON_PATH)
    write_record(tmp_path, release("Redis 6.2.14"))  # another server was started there by hand
    assert release_of_data(tmp_path) == Release("Redis", OLDEST_ON_PATH)


def test_data_of_two_servers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").touch()
    folder = tmp_path / FOLDER_OF_7
    folder.mkdir()
    assert release_of_data(tmp_path) == Release("Redis", OLDEST_ON_PATH)  # Redis 7 was stopped as it began to import
    manifest = folder / "appendonly.aof.manifest"
    manifest.write_text("file appendonly.aof seq 1 type b\n")
    assert release_of_data(tmp_path) == Release("Redis", OLDEST_ON_PATH)
    manifest.write_text("file appendonly.aof.1.base.rdb seq 1 type b\nfile appendonly.aof.1.incr.aof seq 1 type i\n")
    with pytest.raises(OnbeatError, match=r"holds data of two servers.* move the one whose jobs you do not need"):
        release_of_data(tmp_path)


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        ("Redis 7.2.1", "put redis-server 7.2.1 or newer, or valkey-server, on the PATH"),
        ("Redis 7.4.1", "put redis-server 7.4.1 or newer on the PATH"),
        ("Valkey 8.1.3", "put valkey-server 8.1.3 or newer on the PATH"),
    ],
)
def test_servers_that_cannot_read_the_data_are_refused(install, tmp_path, data, remedy):
    install("redis-server", "echo 'Redis server v=7.0.15 sha=00000000:0'")
    (tmp_path / FOLDER_OF_7).mkdir()
    write_record(tmp_path, release(data))
    with pytest.raises(OnbeatError) as caught:
        choose_server(tmp_path)
    refusal = f"holds data of {data}, which Redis 7.0.15 and Redis 6.2.14 cannot read; {remedy}"
    assert str(caught.value) == f"{tmp_path} {refusal}"


# ---- real servers ----------------------------------------------------------------------------------------------


def test_data_goes_from_the_embedded_server_to_a_newer_one(tmp_path, stored, newest_path):
    """And not back: the older server would begin empty."""
    assert stored(tmp_path, "") == (1, 6)
    count, major = stored(tmp_path, newest_path)
    assert (count, major >= 7) == (2, True)
    assert stored(tmp_path, newest_path) == (3, major)
    with pytest.raises(OnbeatError, match=r"which Redis 6\.2\.14 cannot read; put "):
        stored(tmp_path, "")
    (tmp_path / "redis" / "server.json").unlink()  # as in a folder of an older Onbeat
    with pytest.raises(OnbeatError, match=r"holds data of Redis 7\.0, which Redis 6\.2\.14 cannot read; put "):
        stored(tmp_path, "")
    assert stored(tmp_path, newest_path) == (4, major)


def test_view_starts_each_server_and_says_which(tmp_path, monkeypatch, redis_server):
    monkeypatch.setenv("PATH", "" if redis_server.is_embedded else os.environ["PATH"])
    lines: list[str] = []
    for count in (1, 2):
        with local_stack(StackOptions(tmp_path, is_view=True), "view", lines.append):
            state = running_stack(tmp_path)
            assert state is not None
            with Redis.from_url(state.redis_url) as client:
                assert client.incr("starts") == count
    assert lines == [f"using {redis_server}"] * 2
