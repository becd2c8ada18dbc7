"""`python -m services.broker`: exits 0 when asked to stop, 1 when it cannot go on."""

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Iterator

import uvicorn
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError

from onbeat.logging import configure
from onbeat.streams.connection import connect
from onbeat.streams.ledger import Ledger
from services.broker.app import create_app
from services.broker.settings import Settings

logger = logging.getLogger("services.broker")

DRAIN_S = 5  # for requests in flight after SIGTERM


def main() -> int:
    try:
        settings = Settings()
        configure(settings.log_format, settings.log_level)
    except ValidationError as error:
        names = [f"ONBEAT_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors()]
        sys.stderr.write(f"the broker's settings are wrong: {'; '.join(names)}\n")
        return 2
    try:
        return asyncio.run(serve(settings))
    except KeyboardInterrupt:
        return 130


async def serve(settings: Settings) -> int:
    try:
        redis = connect(settings.redis_url, settings.redis_retry_s)
    except ValueError as error:
        logger.critical("ONBEAT_REDIS_URL is wrong: %s", error)
        return 2
    try:
        if not await wait_for_redis(redis, settings):
            return 1
        return await run_server(settings, Ledger(redis))
    finally:
        await redis.aclose()


async def wait_for_redis(redis: Redis, settings: Settings) -> bool:
    """Bounded by redis_retry_s; says what it waits for."""
    started = time.monotonic()
    probe = connect(settings.redis_url, retry_s=1)
    try:
        while True:
            try:
                await probe.ping()
                return True
            except RedisError as error:
                waited_s = time.monotonic() - started
                if isinstance(error, AuthenticationError) or waited_s > settings.redis_retry_s:
                    logger.critical(
                        "no Redis at %s after %.0f s (%s); start it, or set ONBEAT_REDIS_URL",
                        *(public_url(redis), waited_s, error),
                    )
                    return False
                logger.warning("waiting for Redis at %s (%s)", public_url(redis), error)
                await asyncio.sleep(1.0)
    finally:
        await probe.aclose()


def public_url(redis: Redis) -> str:
    """Without the password."""
    options = redis.connection_pool.connection_kwargs
    return f"{options.get('host', options.get('path', '?'))}:{options.get('port', '')}/{options.get('db', 0)}"


class Server(uvicorn.Server):
    """Leaves signals to us: asked to stop, we drain and exit 0 instead of dying of the signal afterwards."""

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
        )
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logger.info("serving http://%s:%d, Redis %s", settings.host, settings.port, public_url(ledger.redis))
    await server.serve()
    return 1 if has_failed or not server.started else 0


if __name__ == "__main__":
    sys.exit(main())
