"""The connection to Redis that every service uses."""

import asyncio
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError, TimeoutError


class CancellableRedis(Redis):
    """Redis whose commands let a cancellation through.

    redis-py sends inside `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that arrives in the moment
    when the sending is done (github.com/python/cpython/issues/86296): the task would run on for ever.
    """

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        task = asyncio.current_task()
        num_cancels = task.cancelling() if task else 0
        try:
            return await super().execute_command(*args, **options)
        finally:
            if task and task.cancelling() > num_cancels:
                raise asyncio.CancelledError


def connect(url: str, retry_s: float = 30.0) -> Redis:
    """A client that rides out a restart of Redis for about `retry_s`, then raises redis' ConnectionError."""
    num_retries = max(1, int(retry_s))
    retry = Retry(ExponentialBackoff(cap=1.0, base=0.05), num_retries)
    return CancellableRedis.from_url(
        url,
        retry=retry,
        retry_on_error=[ConnectionError, TimeoutError],
        protocol=2,
        socket_timeout=30.0,
        socket_connect_timeout=5.0,
        health_check_interval=30,
    )
