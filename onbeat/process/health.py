"""The probes and Prometheus metrics of a service without a REST API of its own: /livez, /readyz and /metrics."""

import asyncio
import threading
import time
from collections.abc import Iterable
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from pydantic import BaseModel, Field
from redis.asyncio import Redis
from redis.exceptions import RedisError

TURN_S = 1.0
PING_S = 2.0
LIVE_S = 120.0  # loading an engine's libraries may hold up the event loop for this long
READY_S = 10.0


class Health:
    """The health of a service. Alive: the event loop turns. Ready: Redis has answered within READY_S."""

    def __init__(self) -> None:
        self._turned_at = time.monotonic()
        self._answered_at = self._turned_at - READY_S

    async def watch(self, redis: Redis) -> None:
        """Watch event loop and Redis until cancelled. This runs on the loop that does the work."""
        while True:
            self._turned_at = time.monotonic()
            try:
                async with asyncio.timeout(PING_S):
                    await redis.ping()
                self._answered_at = time.monotonic()
            except (RedisError, TimeoutError):
                pass  # the probe reports it
            await asyncio.sleep(TURN_S)

    def why_not_live(self) -> str:
        silence_s = time.monotonic() - self._turned_at
        return f"the event loop stands still since {silence_s:.0f} s" if silence_s > LIVE_S else ""

    def why_not_ready(self) -> str:
        silence_s = time.monotonic() - self._answered_at
        return self.why_not_live() or (f"Redis has not answered for {READY_S:.0f} s" if silence_s > READY_S else "")

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a request as a WSGI application."""
        match environ["PATH_INFO"]:
            case "/livez":
                problem = self.why_not_live()
            case "/readyz":
                problem = self.why_not_ready()
            case "/metrics":
                metrics: WSGIApplication = make_wsgi_app()
                return metrics(environ, start_response)
            case _:
                start_response("404 Not Found", [("Content-Type", "text/plain")])
                return [b"here are /livez, /readyz and /metrics\n"]
        status = "503 Service Unavailable" if problem else "200 OK"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{problem or 'ok'}\n".encode()]


class HealthSettings(BaseModel):
    """The part of a service's settings with its health port: `class Settings(HealthSettings, BaseSettings)`."""

    metrics_port: int = Field(
        0, ge=0, lt=65536, description="/livez, /readyz and /metrics (Prometheus) over HTTP; 0: off"
    )
    metrics_host: str = Field("127.0.0.1", description="interface of the metrics port")

    def serve_health(self) -> Health:
        """Answer in a separate thread until the process ends. Raise ValueError when the port cannot be bound."""
        health = Health()
        if self.metrics_port:
            host, port = self.metrics_host, self.metrics_port
            try:
                server = make_server(host, port, health, ThreadingWSGIServer, SilentHandler)
            except OSError as error:
                where = f"ONBEAT_METRICS_HOST={host}, ONBEAT_METRICS_PORT={port}"
                raise ValueError(f"nothing can listen at {where}: {error}; choose another port") from error
            threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
        return health


class SilentHandler(WSGIRequestHandler):
    timeout = 10.0  # limit for a connection that sends nothing

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: probes come every second."""
