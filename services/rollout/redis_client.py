"""A Redis client whose commands can be cancelled.

redis-py sends through `asyncio.wait_for`, and that of Python 3.11 returns normally when the cancellation comes just as
the bytes are out (https://github.com/python/cpython/issues/86296). The cancelled task would go on, and a task group
would wait for it for ever.
"""

import asyncio
from typing import Any

from redis.asyncio import Redis

from onbeat.streams import ledger


class CancellableRedis(Redis):
    async def execute_command(self, *args: Any, **options: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        num_cancellations = task.cancelling()
        answer = await super().execute_command(*args, **options)
        if task.cancelling() > num_cancellations:
            raise asyncio.CancelledError
        return answer


def connect(url: str, retry_s: float) -> Redis:
    """As `onbeat.streams.ledger.connect`."""
    return CancellableRedis.from_pool(ledger.connect(url, retry_s).connection_pool)
