"""A process's last calls to Redis. If they fail nothing is lost: leases run out, and old heartbeats are forgotten."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import RedisError

logger = logging.getLogger(__name__)


@contextmanager
def best_effort(loss: str, *also: type[Exception]) -> Iterator[None]:
    """Continue after an error of Redis, a timeout or one of `also`; log it with `loss`, the consequence."""
    errors: tuple[type[Exception], ...] = (RedisError, TimeoutError, *also)
    try:
        yield
    except errors as error:
        logger.warning("%s: %s", loss, error)
