"""The ledger's tests run on each server that Onbeat starts."""

from collections.abc import Iterator

import pytest

from onbeat.local.redis_choice import RedisServer
from tests.conftest import own_redis


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[str]:
    with own_redis(tmp_path_factory.mktemp("redis"), redis_server) as url:
        yield url
