"""A Redis that fails over: the old primary stays up as a replica, with its connections, and the address leads to the
new primary. Broker, trainer and rollout leave the one for the other."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio
import redis as sync_redis
from redis.asyncio import Redis

from onbeat.contracts.states import IterationState
from onbeat.local.redis_choice import RedisServer
from onbeat.streams.connection import NotPrimary, connect, describe_loss
from onbeat.streams.ledger import Ledger
from tests.broker_fixtures import running_broker
from tests.chaos.proxy import Proxy
from tests.conftest import own_redis
from tests.waiting import eventually, wait_until
from tests.world import World

DEADLINE_S = 30.0


@dataclass
class Pair:
    """A primary, its replica, and an address that leads to the primary."""

    primary: sync_redis.Redis
    replica: sync_redis.Redis
    proxy: Proxy

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.proxy.port}"

    def demote(self) -> None:
        """Make the primary a replica; the address still leads to it."""
        wait_until(lambda: self.primary.wait(1, 1000) == 1, "the replica has all writes", DEADLINE_S)
        self.primary.replicaof("127.0.0.1", port_of(self.replica))

    def fail_over(self) -> None:
        """Change the roles, and the address. All connections stay."""
        wait_until(lambda: self.primary.wait(1, 1000) == 1, "the replica has all writes", DEADLINE_S)
        self.replica.replicaof("NO", "ONE")
        self.proxy.target_port = port_of(self.replica)
        self.primary.replicaof("127.0.0.1", port_of(self.replica))


def is_blocked(server: sync_redis.Redis, command: str) -> bool:
    return any(client["cmd"] == command and "b" in client["flags"] for client in server.client_list())


def port_of(server: sync_redis.Redis) -> int:
    return int(server.get_connection_kwargs()["port"])


@pytest.fixture
def pair(tmp_path: Path, redis_server: RedisServer) -> Iterator[Pair]:
    more = ("--repl-diskless-sync-delay", "0")
    with ExitStack() as servers:
        urls = [servers.enter_context(own_redis(tmp_path / name, redis_server, more)) for name in ("one", "two")]
        primary, replica = (servers.enter_context(sync_redis.Redis.from_url(url)) for url in urls)
        replica.replicaof("127.0.0.1", port_of(primary))
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up", "it follows", DEADLINE_S)
        proxy = Proxy(port_of(primary))
        servers.callback(proxy.close)
        yield Pair(primary, replica, proxy)


@pytest_asyncio.fixture
async def redis(pair: Pair) -> AsyncIterator[Redis]:
    client = connect(pair.url, retry_s=DEADLINE_S)
    yield client
    await client.aclose()


async def test_job_goes_on_at_the_new_primary(pair: Pair, redis: Redis, tmp_path: Path) -> None:
    """The broker's conductor, a trainer's blocked XREADGROUP and a rollout's scripts, all through one address."""
    trainer, rollout = connect(pair.url, DEADLINE_S), connect(pair.url, DEADLINE_S)
    async with running_broker(Ledger(redis), tmp_path) as broker:
        world = World(Ledger(rollout))
        job_id, epoch = await world.started_job(schedule={"num_iterations": 2})
        await world.wait_open(job_id, 0)
        taking = asyncio.create_task(Ledger(trainer).trainer.take(job_id, "t0", 1, DEADLINE_S))
        await eventually("XREADGROUP blocks", partial(is_blocked, pair.primary, "xreadgroup"))
        claims = await world.claim_all(job_id)
        pair.fail_over()
        await world.submit_groups(job_id, claims)
        assert len(await taking) == 1
        assert await World(Ledger(trainer)).commit(job_id, epoch, 0)
        state = partial(world.ledger.iterations.state, job_id, 1)
        await world.drain_until(job_id, state, IterationState.DRAINED, DEADLINE_S)
        assert (await broker.get("/readyz")).status_code == 200
    await trainer.aclose()
    await rollout.aclose()


async def test_reads_do_not_stay_with_the_old_primary(pair: Pair, redis: Redis) -> None:
    """A replica answers reads, so that a connection which only reads would never notice."""
    await asyncio.gather(*(redis.get("key") for _ in range(5)))  # as many connections, idle then
    reading = asyncio.create_task(redis.xread({"stream": "$"}, block=int(1000 * DEADLINE_S)))
    await eventually("XREAD blocks", partial(is_blocked, pair.primary, "xread"))
    pair.fail_over()
    pair.primary.replicaof("127.0.0.1", 1)  # nothing that is written from now on arrives there
    await redis.set("key", "new")
    assert await asyncio.gather(*(redis.get("key") for _ in range(5))) == [b"new"] * 5
    while not reading.done():
        await redis.xadd("stream", {"field": "value"})
        await asyncio.sleep(0.02)
    assert reading.result()


@pytest.mark.parametrize("is_transaction", [True, False])
@pytest.mark.parametrize("raises", [True, False])
async def test_pipeline_is_repeated_as_a_whole(pair: Pair, redis: Redis, is_transaction: bool, raises: bool) -> None:
    await redis.ping()
    pair.fail_over()
    pipeline = redis.pipeline(transaction=is_transaction)
    pipeline.get("count")
    pipeline.incr("count")
    pipeline.eval("return redis.call('INCR', KEYS[1])", 1, "count")
    assert await pipeline.execute(raise_on_error=raises) == [None, 1, 2]


async def test_script_writes_once(pair: Pair, redis: Redis) -> None:
    script = redis.register_script("redis.call('GET', KEYS[1]); return redis.call('INCR', KEYS[1])")
    assert await script(keys=["count"]) == 1
    pair.fail_over()
    assert await script(keys=["count"]) == 2


async def test_primary_that_does_not_come_is_given_up_after_retry_s(pair: Pair) -> None:
    redis = connect(pair.url, retry_s=4)
    await redis.ping()
    pair.demote()
    started = time.monotonic()
    with pytest.raises(NotPrimary) as caught:
        await redis.set("key", "value")
    assert 1.0 < time.monotonic() - started < 20.0  # four attempts, with longer and longer delays
    sentence = describe_loss(redis, caught.value)
    assert sentence.startswith(f"Redis at 127.0.0.1:{pair.proxy.port}/0 takes no writes, as a replica does (")
    assert sentence.endswith("give ONBEAT_REDIS_URL the address of the primary, or one that follows it")
    await redis.aclose()


async def test_command_that_lacks_replicas_waits_for_them(pair: Pair, redis: Redis) -> None:
    """`min-replicas-to-write` refuses writes while the replicas of a new primary connect."""
    pair.primary.config_set("min-replicas-to-write", 2)
    writing = asyncio.create_task(redis.set("key", "value"))
    await asyncio.sleep(0.2)
    assert not writing.done()
    pair.primary.config_set("min-replicas-to-write", 0)
    assert await writing
