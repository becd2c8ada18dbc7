"""The local stack's Redis: durable (append-only file), on loopback only, with a password that the state file holds."""

import errno
import json
import os
import secrets
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

from onbeat.contracts.data_folder import REDIS_FOLDER
from onbeat.contracts.errors import OnbeatError
from onbeat.local.redis_choice import RedisServer, write_record
from onbeat.local.supervisor import ServiceSpec

HOST = "127.0.0.1"


def redis_service(data_dir: Path, server: RedisServer) -> tuple[ServiceSpec, str]:
    """Return the service to start, and the URL of its Redis."""
    folder = data_dir / REDIS_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    port, password = free_port(), secrets.token_urlsafe(24)
    config_path = folder / "redis.conf"
    config_path.touch(mode=0o600)
    config_path.chmod(0o600)
    lines = [
        f"bind {HOST}",
        f"port {port}",
        f"requirepass {password}",
        f"dir {json.dumps(str(folder), ensure_ascii=False)}",  # quoted as Redis reads it
        "daemonize no",
        "appendonly yes",
        "appendfsync everysec",
        'save ""',  # the append-only file is the only record
        "maxmemory-policy noeviction",
    ]
    config_path.write_bytes(os.fsencode("\n".join(lines) + "\n"))
    write_record(folder, server.release)
    url = f"redis://:{password}@{HOST}:{port}/0"
    command = [server.path, str(config_path)]
    return ServiceSpec("redis", command, wave=0, missing=partial(missing_redis, url), ready_deadline_s=60.0), url


def missing_redis(url: str) -> str:
    """Return why Redis does not answer yet; '' when it does."""
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(url, socket_timeout=2.0, socket_connect_timeout=2.0, retry=None) as client:
            client.ping()
    except RedisError as error:
        return str(error)
    return ""


def checked_port(port: int) -> int:
    """Return the port that the user asks for. Raise ValueError for one that cannot be bound."""
    try:
        return bind(port)
    except OSError as error:
        reason = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise ValueError(f"--port {port}: {reason}; take another port, or leave --port out") from error


def free_port(preferred: int | None = None) -> int:
    """Return `preferred` if that port is free, else one that the system picks."""
    for port in [preferred, 0] if preferred else [0]:
        with suppress(OSError):
            return bind(port)
    raise OnbeatError(f"no free TCP port on {HOST}")


def bind(port: int) -> int:
    """Bind the port for a moment; 0: one that the system picks. Return its number."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
        return int(probe.getsockname()[1])
