"""A whole broker in a thread of the test's process, for tests that block or start commands."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from onbeat.contracts.records import WorkerRecord
from onbeat.process.loop_thread import LoopThread
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from services.broker.api.problems import problem
from tests.broker_fixtures import serving
from tests.world import World


@dataclass
class Wire:
    """The requests to a broker, and what is to happen to its answers."""

    requests: list[tuple[str, str]] = field(default_factory=list)  # methods and paths
    authorization: str | None = None  # header of the last request
    delay_s: float = 0.0
    failures: list[int] = field(default_factory=list)  # status codes, which the next requests get at once
    change: tuple[bytes, bytes] = (b"", b"")  # old and new text, of the same length


class BrokerThread:
    """A whole broker at `url`, on a Redis of its own."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.ledger, self.folder, self.url = Ledger(connect(redis_url, retry_s=5)), folder, ""
        self.wire = Wire()  # faults that a test sets
        self._thread = LoopThread("broker")

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run the coroutine where the broker runs, and return its result."""
        return self._thread.run(coroutine)

    @contextlib.contextmanager
    def serve(self, port: int = 0) -> Iterator[str]:
        """Serve at a port meanwhile; yield the URL."""
        running = serving(self.ledger, self.folder, port=port, wire=self._through_wire)
        broker = self.run(running.__aenter__())
        try:
            yield broker.url
        finally:
            self.run(running.__aexit__(None, None, None))

    @contextlib.contextmanager
    def meanwhile(self, work: Coroutine[Any, Any, None]) -> Iterator[None]:
        """Do the work beside the broker, and cancel it at the end."""
        running = self._thread.start(work)
        try:
            yield
        finally:
            running.cancel()

    def create_job(self, **sections: Any) -> str:
        """Return the id of a new job, which nobody has checked."""
        return str(self.run(World(self.ledger).create_job(**sections)))

    def beat(self, *rollouts: WorkerRecord, ago_s: float = 0.0) -> None:
        """Be rollouts that were last seen some time ago."""
        for rollout in rollouts:
            self.run(World(self.ledger).beat("default", rollout, ago_s))

    def reset(self) -> None:
        self.wire = Wire()
        self.run(self.ledger.redis.flushall())

    def close(self) -> None:
        self._thread.close(self.ledger.redis.aclose())

    def _through_wire(self, app: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                return await app(scope, receive, send)

            async def send_changed(message: Message) -> None:
                if "body" in message:
                    message["body"] = message["body"].replace(*wire.change)
                await send(message)

            wire, request = self.wire, Request(scope)
            wire.requests.append((request.method, request.url.path))
            wire.authorization = request.headers.get("authorization")
            await asyncio.sleep(wire.delay_s)
            respond = problem(wire.failures.pop(0), "not now") if wire.failures else app
            await respond(scope, receive, send_changed)

        return answer
