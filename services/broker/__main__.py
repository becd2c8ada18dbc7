"""The broker process (`python -m services.broker`): it exits 0 when asked to stop, 1 when it cannot continue."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator

from onbeat.process.extras import require_extra

require_extra("broker", user="the broker", error=SystemExit)  # before the imports that would fail

import uvicorn
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError

from onbeat.process.logging import configure
from onbeat.process.settings import read_settings, warn_of_misspelt
from onbeat.streams.connection import RedisUnfit, describe_loss, public_address
from onbeat.streams.ledger import Ledger
from services.broker.app import create_app
from services.broker.connection import connection_class
from services.broker.settings import Settings

logger = logging.getLogger("services.broker")

TLS_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"  # TLS 1.2 only; all of TLS 1.3 are good, and older versions are refused
DRAIN_S = 5  # time for requests in flight after SIGTERM


def main() -> int:
    settings = read_settings(Settings, "broker")
    configure(settings.log_format, settings.log_level)
    warn_of_misspelt(settings, "broker")
    try:
        return asyncio.run(serve(settings))
    except KeyboardInterrupt:
        return 130


async def serve(settings: Settings) -> int:
    try:
        redis = settings.connect_redis()
    except ValueError as error:
        logger.critical("%s", error)
        return 2
    try:
        if not await wait_for_redis(redis, settings):
            return 1
        return await run_server(settings, Ledger(redis))
    finally:
        await redis.aclose()


async def wait_for_redis(redis: Redis, settings: Settings) -> bool:
    """Wait for Redis for up to redis_retry_s, and log it. Returns whether Redis answers."""
    started = time.monotonic()
    probe = settings.connect_redis(retry_s=1)
    try:
        while True:
            try:
                await probe.ping()
                return True
            except (AuthenticationError, RedisUnfit) as error:
                logger.critical("%s", describe_loss(redis, error))
                return False
            except RedisError as error:
                waited_s, where = time.monotonic() - started, public_address(redis)
                if waited_s > settings.redis_retry_s:
                    remedy = "start it, or set ONBEAT_REDIS_URL"
                    logger.critical("no Redis at %s after %.0f s (%s); %s", where, waited_s, error, remedy)
                    return False
                logger.warning("waiting for Redis at %s (%s)", where, error)
                await asyncio.sleep(1.0)
    finally:
        await probe.aclose()


class Server(uvicorn.Server):
    """A server that leaves signals to us: asked to stop, we drain and exit 0; uvicorn would die of the signal."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn has logged the system's words
            place, remedy = self.config.host, "stop what listens there, or set ONBEAT_PORT or ONBEAT_HOST"
            logger.critical("the broker cannot listen on port %d of %s; %s", self.config.port, place, remedy)
            raise

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


async def run_server(settings: Settings, ledger: Ledger) -> int:
    has_failed = False

    def give_up() -> None:
        nonlocal has_failed
        has_failed = True
        server.should_exit = True

    app = create_app(settings, ledger, on_conductor_end=give_up, is_stopping=lambda: server.should_exit)
    server = Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=DRAIN_S,
            server_header=False,
            http=connection_class(settings.request_timeout_s),
            ws="none",
            limit_concurrency=settings.max_connections,
            proxy_headers=bool(settings.trusted_proxies),
            forwarded_allow_ips=settings.trusted_proxies,
            ssl_certfile=settings.tls_cert,
            ssl_keyfile=settings.tls_key,
            ssl_ciphers=TLS_CIPHERS,
        )
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    url = f"{'https' if settings.tls_cert else 'http'}://{settings.host}:{settings.port}"
    access = f"API keys of {settings.api_keys_file}" if settings.api_keys_file else "no API keys: everybody is an admin"
    logger.info("serving %s, %s, Redis %s", url, access, public_address(ledger.redis))
    await server.serve()
    return 1 if has_failed or not server.started else 0


if __name__ == "__main__":
    sys.exit(main())
