"""A whole broker for a test: in its process, at a port, or as a process of its own."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from onbeat.process.api_keys import Role, keys_to_edit, new_key
from onbeat.streams.ledger import Ledger
from services.broker.app import create_app
from services.broker.connection import connection_class
from services.broker.settings import Settings
from services.broker.views.live import JobStreams
from tests.conftest import free_port
from tests.waiting import eventually, wait_until
from tests.world import job_body


def write_prompts(data_dir: Path) -> None:
    rows = [{"prompt": f"say {i}", "answer": str(i), "level": i} for i in range(5)]
    (data_dir / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.asynccontextmanager
async def running_broker(ledger: Ledger, data_dir: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Run the whole application, conductor included, without a socket."""
    write_prompts(data_dir)
    app = create_app(Settings(data_dir=data_dir, **settings), ledger)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
    async with app.router.lifespan_context(app), client:
        yield client


class Server(uvicorn.Server):
    """In this process, so that a test can look into it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Broker:
    url: str
    streams: JobStreams
    server: Server

    @property
    def num_watchers(self) -> int:
        return self.streams._num_watchers


@contextlib.asynccontextmanager
async def serving(
    ledger: Ledger,
    folder: Path,
    stall_s: float = 30.0,
    port: int = 0,
    has_conductor: bool = True,
    wire: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **more: Any,
) -> AsyncIterator[Broker]:
    """Serve the whole application at a port of this machine, behind a `wire`."""
    write_prompts(folder)
    port = port or free_port()
    settings = Settings(data_dir=folder, port=port, **more)
    app = create_app(settings, ledger, is_stopping=lambda: server.should_exit)
    options: dict[str, Any] = {"http": connection_class(stall_s), "lifespan": "on" if has_conductor else "off"}
    config = uvicorn.Config(wire(app), port=port, log_config=None, ws="none", timeout_graceful_shutdown=5, **options)
    server = Server(config)
    running = asyncio.create_task(server.serve())
    await eventually("the broker serves", lambda: server.started)
    try:
        yield Broker(f"http://127.0.0.1:{port}", app.state.context.streams, server)
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, 30.0)


def start_service(service: str, folder: Path, **env: str) -> subprocess.Popen[bytes]:
    """Start a service as its users do; its log is `folder/log`."""
    names = {f"ONBEAT_{name}": value for name, value in env.items()} | {"ONBEAT_DATA_DIR": str(folder)}
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", f"services.{service}"]
        return subprocess.Popen(command, env=os.environ | names, stdout=log, stderr=log)


@contextlib.contextmanager
def broker_process(
    folder: Path, redis_url: str, trusted: ssl.SSLContext | bool = True, **env: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the URL and the process of a broker that is ready."""
    write_prompts(folder)
    port = free_port()
    url = f"{'https' if 'TLS_CERT' in env else 'http'}://127.0.0.1:{port}"
    process = start_service("broker", folder, REDIS_URL=redis_url, PORT=str(port), **env)

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/readyz", verify=trusted, trust_env=False).status_code == 200
        return False

    try:
        wait_until(is_ready, "the broker is ready", 60.0)
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Keys:
    """A keys file, and the keys that are in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_role = {role: self.add(role) for role in Role}

    def add(self, role: Role, lifetime: timedelta | None = None) -> str:
        key, entry = new_key(f"{role}-of-test", role, lifetime)
        with keys_to_edit(self.path) as keys:
            keys.append(entry)
        return key

    def revoke(self, key: str) -> None:
        with keys_to_edit(self.path) as keys:
            keys[:] = [entry for entry in keys if entry.id != key.split("_")[1]]

    def header(self, role: Role) -> dict[str, str]:
        return bearer(self.by_role[role])


async def submit(broker: httpx.AsyncClient, **sections: Any) -> str:
    """Submit a job over REST; returns its id."""
    answer = await broker.post("/v1/jobs", json=job_body(**sections))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])
