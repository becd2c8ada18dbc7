"""Redis behind a password, a user with the least rights, and TLS: Onbeat works there, and that user can do no more."""

import asyncio
import hashlib
import re
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import redis as sync_redis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError

from onbeat.contracts.states import IterationState, JobState
from onbeat.local.redis_choice import RedisServer
from onbeat.streams.connection import RedisSettings, connect, public_address
from onbeat.streams.ledger import Ledger
from services.trainer.settings import Settings
from tests.broker_fixtures import running_broker
from tests.conftest import free_port, own_redis
from tests.integration.authority import Authority
from tests.world import World, failed_group

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "deploy" / "redis" / "users.acl.example"
PASSWORD, ADMIN_PASSWORD = "p/ss w:rd", "of-the-admin"
DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[int]:
    """Run a Redis with the users of the example, made as docs/security.md describes, and yield its port."""
    rules = EXAMPLE.read_text()
    for name, password in (("ADMIN_PASSWORD", ADMIN_PASSWORD), ("PASSWORD", PASSWORD)):
        rules = rules.replace(f"SHA256_OF_THE_{name}", hashlib.sha256(password.encode()).hexdigest())
    with own_redis(tmp_path_factory.mktemp("redis"), redis_server) as url:
        with sync_redis.Redis.from_url(url) as opened:
            for line in rules.splitlines():
                if not line.startswith("user default"):
                    opened.execute_command("ACL", "SETUSER", *line.split()[1:])
            default = next(line for line in rules.splitlines() if line.startswith("user default"))
            opened.execute_command("ACL", "SETUSER", *default.split()[1:])
        yield int(url.rpartition(":")[2])


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{PASSWORD}\n")
    return path


@asynccontextmanager
async def as_onbeat(port: int, password_file: Path) -> AsyncIterator[Redis]:
    url = f"redis://127.0.0.1:{port}"
    client = RedisSettings(redis_url=url, redis_username="onbeat", redis_password_file=password_file).connect_redis(5)
    yield client
    await client.aclose()


# ---- the user ----------------------------------------------------------------------------------------------------


def test_example_is_refused_until_the_passwords_are_filled_in(redis_server: RedisServer) -> None:
    command = [redis_server.path, "--port", str(free_port()), "--aclfile", str(EXAMPLE)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode != 0
    assert "ACL" in ended.stdout


async def test_jobs_run_as_a_user_with_the_least_rights(port: int, password_file: Path, tmp_path: Path) -> None:
    """Broker, trainer and rollouts: a whole job with an evaluation, a failure, a pause, and one that is cancelled."""
    stranger = connect(f"redis://127.0.0.1:{port}", 1)
    with pytest.raises((ResponseError, ConnectionError), match=r"uthentication required|NOAUTH"):
        await stranger.ping()  # the default user is off
    await stranger.aclose()
    async with as_onbeat(port, password_file) as redis:
        ledger = Ledger(redis)
        async with running_broker(ledger, tmp_path) as broker:
            evaluation = {"every_iterations": 1, "num_samples_per_prompt": 1}
            evaluation["data"] = {"type": "jsonl", "path": "prompts.jsonl"}  # type: ignore[assignment]
            job_id, epoch = await World(ledger).started_job(evaluation=evaluation, schedule={"num_iterations": 2})
            assert (await broker.post(f"/v1/jobs/{job_id}:pause")).json()["state"] == "PAUSED"
            assert (await broker.post(f"/v1/jobs/{job_id}:resume")).json()["state"] == "RUNNING"
            await World(ledger).wait_open(job_id, 0)
            (claim,) = await ledger.rollout.claim(job_id, "w0", 1, 30)
            assert await ledger.rollout.renew(job_id, "w0", [claim.entry_id]) == [claim.entry_id]
            await ledger.rollout.release(job_id, "w0", [claim.entry_id])
            (claim,) = await ledger.rollout.claim(job_id, "w0", 1, 30)
            await ledger.rollout.submit(job_id, claim.entry_id, failed_group(claim.task, "w0"))
            for iteration in range(2):
                await World(ledger).wait_open(job_id, iteration)
                state = partial(ledger.iterations.state, job_id, iteration)
                await World(ledger).drain_until(job_id, state, IterationState.DRAINED, DEADLINE_S)
                groups = await ledger.trainer.take(job_id, "trainer", 100, 1.0)
                ids = [group.group_id for group in groups]
                assert await ledger.trainer.record_micro_batch(job_id, epoch, iteration, 0, 0, ids) == ids
                assert await World(ledger).commit(job_id, epoch, iteration)
                await ledger.trainer.checkpointed(job_id, epoch, iteration, iteration + 1, "/checkpoint")
            await ledger.trainer.renew_job(job_id, epoch, 30)
            await ledger.jobs.move(job_id, JobState.SUCCEEDED, epoch=epoch)
            other = await World(ledger).create_job()
            assert (await broker.post(f"/v1/jobs/{other}:cancel")).json()["state"] == "CANCELLED"
            for path in (f"/v1/jobs/{job_id}", f"/v1/jobs/{job_id}/events", f"/v1/jobs/{job_id}/samples", "/readyz"):
                answer = await broker.get(path)
                assert answer.status_code == 200, answer.text
        with sync_redis.Redis(port=port, username="admin", password=ADMIN_PASSWORD) as admin:
            log = admin.execute_command("ACL", "LOG")
        refused = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in log]
        assert [entry[b"object"] for entry in refused if entry[b"username"] == b"onbeat"] == []


def commands_in_use() -> set[str]:
    """Return the commands of the Lua scripts and of our calls of redis-py, also of those that no test here makes."""
    scripts = "".join(path.read_text() for path in (ROOT / "onbeat" / "streams" / "scripts").glob("*.lua"))
    commands = set(re.findall(r"redis\.p?call\(\s*['\"](\w+)['\"]", scripts))
    assert len(commands) == len(set(re.findall(r"redis\.p?call\(\s*([^,)]+)", scripts))), "a command that is no literal"
    sources = [path for folder in ("onbeat", "services") for path in (ROOT / folder).rglob("*.py")]
    sources = [
        path for path in sources if path.parent.name != "local"
    ]  # a local stack's Redis has one user, with all rights
    methods = set(re.findall(r"\bredis\.([a-z_]+)\(", "".join(path.read_text() for path in sources)))
    methods -= {"aclose", "register_script", "pipeline"}  # the commands of these calls are in `sent`
    methods -= {"config_get"}  # the doctor does without: it would tell the passwords, too
    sent = {"evalsha", "script|load", "multi", "exec"}
    return sent | {name.lower() for name in commands} | {method.partition("_")[0] for method in methods}


def test_every_command_of_onbeat_is_allowed(port: int) -> None:
    rule = next(line for line in EXAMPLE.read_text().splitlines() if line.startswith("user onbeat")).split()
    allowed = {word[1:] for word in rule if word.startswith("+") and "@" not in word}
    with sync_redis.Redis(port=port, username="admin", password=ADMIN_PASSWORD) as admin:
        for category in [word[2:] for word in rule if word.startswith("+@")]:
            names = [name.decode() for name in admin.execute_command("ACL", "CAT", category)]
            allowed |= {*names, *(name.partition("|")[0] for name in names)}  # Redis 7 lists xgroup|create, not xgroup
    used = commands_in_use()
    assert {"xautoclaim", "hset", "zadd", "ping", "time"} <= used  # it finds them in both places
    assert used - allowed == set()


REFUSED = [
    ("FLUSHALL",),
    ("FLUSHDB",),
    ("CONFIG", "GET", "*"),
    ("CONFIG", "SET", "requirepass", ""),
    ("KEYS", "*"),
    ("SCAN", "0"),
    ("RANDOMKEY",),
    ("DBSIZE",),
    ("ACL", "SETUSER", "onbeat", "~*"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("CLIENT", "KILL", "TYPE", "normal"),
    ("MONITOR",),
    ("DEBUG", "SLEEP", "0"),
    ("SHUTDOWN", "NOSAVE"),
    ("REPLICAOF", "NO", "ONE"),
    ("MODULE", "LIST"),
    ("SAVE",),
    ("BGREWRITEAOF",),
    ("SCRIPT", "FLUSH"),
    ("SWAPDB", "0", "1"),
    ("PUBLISH", "channel", "x"),
    ("GET", "strangers"),
    ("SET", "onbeat:x", "1"),
    ("DEL", "strangers"),
    ("HSET", "strangers", "a", "b"),
    ("XADD", "onbeats:x", "*", "a", "b"),
    ("SUNIONSTORE", "onbeat:x", "strangers"),
    ("RENAME", "onbeat:x", "y"),
    ("MIGRATE", "127.0.0.1", "1", "onbeat:x", "0", "1"),
    ("EVAL", "return redis.call('DEL', 'strangers')", "0"),
    ("EVAL", "return redis.call('HGETALL', KEYS[1])", "1", "strangers"),
    ("EVAL", "return redis.call('FLUSHALL')", "0"),
]


@pytest.mark.parametrize("command", REFUSED, ids=lambda command: " ".join(command[:2]))
async def test_user_can_do_no_more(port: int, password_file: Path, command: tuple[str, ...]) -> None:
    with sync_redis.Redis(port=port, username="admin", password=ADMIN_PASSWORD) as admin:
        admin.hset("strangers", "theirs", "1")
    async with as_onbeat(port, password_file) as redis:
        with pytest.raises(ResponseError, match=r"permission|can't access|can't run|^DEBUG command not allowed"):
            await redis.execute_command(*command)
    with sync_redis.Redis(port=port, username="admin", password=ADMIN_PASSWORD) as admin:
        assert admin.hgetall("strangers") == {b"theirs": b"1"}


# ---- the password ------------------------------------------------------------------------------------------------


async def test_changed_password_is_read_for_the_next_connection(tmp_path: Path, redis_server: RedisServer) -> None:
    file = tmp_path / "password"
    with own_redis(tmp_path, redis_server) as url:
        with sync_redis.Redis.from_url(url) as admin:
            admin.acl_setuser("default", enabled=True, reset_passwords=True, passwords=["+old"])
        file.write_text("old")
        client = RedisSettings(redis_url=url, redis_password_file=file).connect_redis(30)
        assert await client.ping()
        with sync_redis.Redis.from_url(url, password="old") as admin:
            admin.acl_setuser("default", enabled=True, reset_passwords=True, passwords=["+new"])
            admin.client_kill_filter(_type="normal", skipme=True)
        file.write_text("new")
        assert await client.ping()
        await client.aclose()


def test_user_may_stand_in_the_url_and_the_password_in_a_file(password_file: Path) -> None:
    settings = RedisSettings(redis_url="redis://onbeat@redis.example:6380/3", redis_password_file=password_file)
    client = settings.connect_redis()
    assert public_address(client) == "redis.example:6380/3"
    provider = client.connection_pool.connection_kwargs["credential_provider"]
    assert asyncio.run(provider.get_credentials_async()) == ("onbeat", PASSWORD)


WRONG = [
    ({"url": "redis://:s3cr3t@h", "password_file": "password"}, "keep one of them"),
    ({"url": "redis://h", "password_file": "missing"}, "cannot be read"),
    ({"url": "redis://h", "password_file": "empty"}, "is empty"),
    ({"url": "redis://h", "ca_file": "ca.pem"}, "make it rediss://"),
    ({"url": "rediss://h", "ca_file": "password"}, "has no PEM certificate"),
    ({"url": "rediss://h", "ca_file": "missing"}, "No such file"),
    ({"url": "rediss://h", "cert_file": "password"}, "set both or neither"),
    ({"url": "redis://:s3cr3t/x@h:1/0"}, "no URL of Redis"),
    ({"url": "redis://:12/s3cr3t@h:1/0"}, "no URL of Redis"),
    ({"url": "redis://:12?s3cr3t@h:1/0"}, "no URL of Redis"),
    ({"url": "redis://:[s3cr3t@h:1/0"}, "no URL of Redis"),
    ({"url": "http://:s3cr3t@h"}, "no URL of Redis"),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_what_cannot_work_is_said_at_once_without_the_password(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "password").write_text("s3cr3t")
    (tmp_path / "empty").write_text("\n")
    settings = RedisSettings.model_validate({f"redis_{name}": value for name, value in options.items()})
    with pytest.raises(ValueError, match=message) as caught:
        settings.connect_redis()
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__context__ is None or "s3cr3t" not in str(caught.value.__context__)


def test_settings_show_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONBEAT_REDIS_URL", "redis://:s3cr3t@h:1/0")
    monkeypatch.setenv("ONBEAT_REDIS_CA_FILE", "")  # as compose files pass on what is unset
    settings = Settings()
    assert "s3cr3t" not in repr(settings)
    assert settings.redis_ca_file is None
    assert public_address(settings.connect_redis()) == "h:1/0"


# ---- TLS ---------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def tls_in_front_of(
    port: int, authority: Authority, name: str, *, asks_for_certificate: bool
) -> AsyncIterator[int]:
    """Serve TLS in front of the tests' Redis, which is built without it, and pass the bytes on."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue(name))
    if asks_for_certificate:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(authority.cert)

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
        except (ConnectionResetError, ssl.SSLError):
            pass
        target.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_redis_over_tls_proves_who_it_is_and_may_ask_who_we_are(port, password_file, authority, tmp_path):
    stranger = Authority(tmp_path / "theirs")
    cert, key = authority.issue("trainer")
    async with tls_in_front_of(port, authority, "127.0.0.1", asks_for_certificate=True) as tls_port:
        place = {"redis_url": f"rediss://onbeat@127.0.0.1:{tls_port}", "redis_password_file": password_file}
        ours = {"redis_cert_file": cert, "redis_key_file": key, "redis_ca_file": authority.cert}
        client = RedisSettings.model_validate(place | ours).connect_redis(5)
        job_id = await World(Ledger(client)).create_job()
        assert await Ledger(client).jobs.state(job_id) is JobState.PENDING
        await client.aclose()
        for options in (ours | {"redis_ca_file": stranger.cert}, {"redis_ca_file": authority.cert}, {}):
            client = RedisSettings.model_validate(place | options).connect_redis(1)
            with pytest.raises(ConnectionError):
                await client.ping()
            await client.aclose()
    async with tls_in_front_of(port, authority, "other.example", asks_for_certificate=False) as tls_port:
        place |= {"redis_url": f"rediss://onbeat@127.0.0.1:{tls_port}", "redis_ca_file": authority.cert}
        client = RedisSettings.model_validate(place).connect_redis(1)
        with pytest.raises(ConnectionError, match=r"verify|match"):
            await client.ping()
        await client.aclose()
