"""The connection to Redis that every service uses.

A lost connection and a server that is failing over are the same to callers: the command is tried again, at the same
address, until the retries are used up. Each write of Onbeat is one command or one script, and a server that refuses
it as a replica has written nothing of it, so that the new primary may be given it as if it were the first.
"""

import asyncio
import builtins
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.connection import AbstractConnection, SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from onbeat.process.network import OptionalFile, check_certificate, read_file, trust

MAX_CONNECTIONS = 10_000  # as many as Redis accepts; with redis-py's default of 100, the 101st blocking read would fail
PASSWORD_FILE = "ONBEAT_REDIS_PASSWORD_FILE"
OLDEST = (6, 2)  # has XAUTOCLAIM, and NOMKSTREAM and MINID of XADD
# Errors of a server that is a replica now, also in a script's error (Redis 6.2 puts them behind its own words).
FAILS_OVER = re.compile(r"(^|[-'])(READONLY|MASTERDOWN|NOREPLICAS) |instance state changed \(master -> replica")


class RedisUnfit(RedisError):
    """Redis cannot serve Onbeat, and never will: it is too old, or a cluster."""


class NotPrimary(ConnectionError):
    """The server takes no writes: another one is, or will be, the primary at this address."""


class Pool(ConnectionPool):
    """A pool whose connections can be left all at once, those that are in use at the end of their command."""

    def leave_server(self) -> None:
        """Connect anew before the next commands: the address may lead to another server by now."""
        for connection in (*self._available_connections, *self._in_use_connections):
            connection.mark_for_reconnect()

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        if connection.should_reconnect():
            await connection.disconnect()
        await super().ensure_connection(connection)


class SharedRetry(Retry):
    """The retries of all connections of a pool, which also leaves a server that has become a replica.

    redis-py would stay with it, and return its errors to callers.
    """

    pool: Pool

    def __deepcopy__(self, memo: object) -> "SharedRetry":
        return self  # redis-py copies it for each connection; it keeps nothing between two calls

    async def call_with_retry(self, do: Callable[[], Awaitable[Any]], *args: Any, **options: Any) -> Any:
        async def do_at_primary() -> Any:
            try:
                answer = await do()
                for part in answer if isinstance(answer, list) else ():  # a pipeline may return its errors
                    if isinstance(part, ResponseError) and is_failing_over(part):
                        raise part
            except ResponseError as error:
                if not is_failing_over(error):
                    raise
                self.pool.leave_server()
                raise NotPrimary(str(error)) from error
            return answer

        return await super().call_with_retry(do_at_primary, *args, **options)


def is_failing_over(error: ResponseError) -> bool:
    """Return whether the server has just become a replica, or refuses to serve until it knows its primary."""
    return isinstance(error, ReadOnlyError | ClusterDownError) or bool(FAILS_OVER.search(str(error)))


class RedisSettings(BaseModel):
    """The part of a service's settings that names its Redis: `class Settings(RedisSettings, BaseSettings)`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    redis_url: str = Field(
        "redis://127.0.0.1:6379",
        repr=False,
        description="the Redis of broker, trainers and rollouts; rediss:// with TLS",
    )
    redis_retry_s: float = Field(60.0, gt=0, description="how long an unreachable Redis is retried before giving up")
    redis_username: str = Field("", description="user of Redis, if the URL names none; empty: its default user")
    redis_password_file: OptionalFile = Field(
        None, description="holds the password of Redis, instead of the URL; read anew for every connection"
    )
    redis_ca_file: OptionalFile = Field(
        None, description="PEM authority of the certificate of Redis; default: those of the system"
    )
    redis_cert_file: OptionalFile = Field(None, description="PEM certificate shown to Redis; with redis_key_file")
    redis_key_file: OptionalFile = Field(None, description="PEM private key of redis_cert_file, not encrypted")

    def connect_redis(self, retry_s: float | None = None) -> Redis:
        """Return a client that survives a restart of Redis for about `retry_s` (default: redis_retry_s), then raises
        redis' ConnectionError. Its first command shows whether Redis is there.

        Raise ValueError for settings that cannot work. No message ever contains the password.
        """
        options = options_in(self.redis_url)
        if self.redis_password_file is not None:
            if options.pop("password", None):
                raise ValueError(
                    "ONBEAT_REDIS_URL has a password and ONBEAT_REDIS_PASSWORD_FILE is set; keep one of them"
                )
            read_file(PASSWORD_FILE, self.redis_password_file)
            username = options.pop("username", self.redis_username)
            options["credential_provider"] = PasswordFile(username, self.redis_password_file)
        elif self.redis_username:
            options.setdefault("username", self.redis_username)
        ca_file, cert_file, key_file = self.redis_ca_file, self.redis_cert_file, self.redis_key_file
        if ca_file or cert_file or key_file:
            check_tls_files(options, ca_file, cert_file, key_file)
            options |= {"ssl_ca_certs": ca_file, "ssl_certfile": cert_file, "ssl_keyfile": key_file}
        num_retries = max(1, int(self.redis_retry_s if retry_s is None else retry_s))
        retry = SharedRetry(ExponentialBackoff(cap=1.0, base=0.05), num_retries)
        defaults: dict[str, Any] = {
            "retry": retry,
            "retry_on_error": [ConnectionError, TimeoutError],
            "protocol": 2,
            "driver_info": None,  # otherwise it sends CLIENT SETINFO, which a user with minimal rights may not use
            "socket_timeout": 30.0,
            "socket_connect_timeout": 5.0,
            "health_check_interval": 30,
            "max_connections": MAX_CONNECTIONS,
        }
        options = defaults | options
        retry.pool = Pool(**options)
        redis = LimitedRedis(connection_pool=retry.pool)
        redis.auto_close_connection_pool = True  # as from_pool does
        redis.limit_s = num_retries + float(options["socket_timeout"])
        return redis


@asynccontextmanager
async def limited(limit_s: float) -> AsyncIterator[None]:
    """Bound the time of a command with all its retries, and let a cancellation through.

    redis-py retries each connection's health check within each retry of the command, so that the tries multiply. And it
    sends inside `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that arrives just when the sending
    is done (github.com/python/cpython/issues/86296): the task would run on for ever.
    """
    task = asyncio.current_task()
    try:
        async with asyncio.timeout(limit_s):
            num_cancels = task.cancelling() if task else 0
            try:
                yield
            finally:
                if task and task.cancelling() > num_cancels:
                    raise asyncio.CancelledError
    except builtins.TimeoutError as error:
        raise TimeoutError(f"no answer within {limit_s:g} s") from error


class LimitedPipeline(Pipeline):
    limit_s: float

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        async with limited(self.limit_s):
            return await super().execute(raise_on_error)


class LimitedRedis(Redis):
    limit_s: float  # limit of a command, with its retries
    is_known: bool = False  # the server's version is known

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Execute a command; before the first one, raise RedisUnfit for a server that cannot serve Onbeat."""
        async with limited(self.limit_s):
            if not self.is_known:
                with suppress(ResponseError):  # a user without the right to ask: its commands show what is missing
                    check_server(await super().execute_command("INFO", "server"))  # type: ignore[no-untyped-call]
                self.is_known = True
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> LimitedPipeline:
        pipeline = LimitedPipeline(self.connection_pool, self.response_callbacks, transaction, shard_hint)
        pipeline.limit_s = self.limit_s
        return pipeline


def check_server(info: Mapping[str, Any]) -> None:
    """Raise RedisUnfit by the answer to INFO, in which Valkey reports the version of Redis that it began as."""
    version = str(info.get("redis_version", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise RedisUnfit(f"it is Redis {version}; Onbeat needs 6.2 or newer, or Valkey")
    if info.get("redis_mode") == "cluster":
        raise RedisUnfit("it is a cluster, and Onbeat needs one primary; set `cluster-enabled no`, or use another")


class PasswordFile(CredentialProvider):
    """The password file, read at every new connection, so that a password can be changed while services run."""

    def __init__(self, username: str, path: Path) -> None:
        self._username, self._path = username, path

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        try:
            password = read_file(PASSWORD_FILE, self._path)
        except ValueError as error:  # the file may just be changing: try again
            raise ConnectionError(str(error)) from None
        return (self._username, password) if self._username else (password,)


def connect(url: str, retry_s: float = 30.0) -> Redis:
    """Return a client as `connect_redis` does, without other settings."""
    return RedisSettings(redis_url=url).connect_redis(retry_s)


def options_in(url: str) -> dict[str, Any]:
    """Return the options in the URL. Raise ValueError without quoting it: the faulty part may be a password."""
    try:
        options, parts = dict(parse_url(url)), urlsplit(url)
        if "@" not in parts.path + parts.query + parts.fragment:  # otherwise the part before it is likely a password
            return options
    except ValueError:
        pass
    raise ValueError(
        "ONBEAT_REDIS_URL is no URL of Redis; expected redis://USER:PASSWORD@HOST:PORT/DB, or rediss:// with TLS. "
        "Write / ? # : % in a password as %2F %3F %23 %3A %25, or put it into a file and set ONBEAT_REDIS_PASSWORD_FILE"
    )


async def why_refused(redis: Redis) -> str:
    """Try one new connection; return what to do if Redis answers and refuses user or password, else ''.

    A client that survives restarts retries, and would report only that it got no answer.
    """
    connection = redis.connection_pool.make_connection()
    connection.retry = Retry(NoBackoff(), 0)
    try:
        await connection.connect()
    except AuthenticationError as error:
        return explain_refusal(error)
    except (RedisError, OSError):
        return ""
    finally:
        await connection.disconnect(nowait=True)
    return ""


def explain_refusal(error: AuthenticationError) -> str:
    return (
        f"it refuses the user or the password ({error}): correct ONBEAT_REDIS_PASSWORD_FILE or ONBEAT_REDIS_URL, and "
        "ONBEAT_REDIS_USERNAME if there is one"
    )


def describe_loss(redis: Redis, error: Exception) -> str:
    """Return, for people, why a process cannot go on without Redis."""
    where = public_address(redis)
    if isinstance(error, AuthenticationError):
        return f"Redis at {where} does not let this process in; {explain_refusal(error)}"
    if isinstance(error, RedisUnfit):
        return f"Redis at {where} cannot be used: {error}"
    if isinstance(error, NotPrimary):
        remedy = "give ONBEAT_REDIS_URL the address of the primary, or one that follows it"
        return f"Redis at {where} takes no writes, as a replica does ({error}); {remedy}"
    if isinstance(error, ResponseError):
        is_full = isinstance(error, OutOfMemoryError) or "MISCONF" in str(error)
        return f"Redis at {where} refuses a command: {error}" + "; its memory or its disk is full" * is_full
    return f"Redis at {where} cannot be reached: {error}"


def public_address(redis: Redis) -> str:
    """Return the address of Redis for messages, without user and password."""
    options = redis.connection_pool.connection_kwargs
    return f"{options.get('host', options.get('path', 'localhost'))}:{options.get('port', 6379)}/{options.get('db', 0)}"


def check_tls_files(
    options: dict[str, Any], ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> None:
    """Check the TLS files: redis-py would retry with a wrong one as if Redis were away. Raise ValueError."""
    if options.get("connection_class") is not SSLConnection:
        raise ValueError("there are TLS files for Redis, but ONBEAT_REDIS_URL is without TLS; make it rediss://")
    if ca_file is not None:
        trust("ONBEAT_REDIS_CA_FILE", ca_file)
    check_certificate(("ONBEAT_REDIS_CERT_FILE", cert_file), ("ONBEAT_REDIS_KEY_FILE", key_file))
