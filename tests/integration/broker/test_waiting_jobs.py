"""Pending jobs: what they cost however many wait, the lists that they are in, and how many one key may have."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from onbeat.contracts.errors import TooManyPending
from onbeat.contracts.states import JobState
from onbeat.machine.processor import Hardware
from onbeat.process.api_keys import Role
from onbeat.streams import keys
from onbeat.streams.connection import connect
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker.app import create_app
from services.broker.conductor import NUM_NEXT, Conductor
from services.broker.datasets.process import DatasetProcess
from services.broker.retention import Retention
from services.broker.settings import Settings
from services.broker.watcher import fail_if_nobody_comes
from services.trainer.__main__ import claim_next
from services.trainer.settings import Settings as TrainerSettings
from tests.broker_fixtures import Keys, bearer, running_broker, write_prompts
from tests.conftest import own_redis
from tests.waiting import eventually
from tests.world import World, job_body


@pytest_asyncio.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Ledger]:
    """Yield the ledger of a Redis that has no other jobs."""
    with own_redis(tmp_path) as url:
        async with connect(url, retry_s=5) as redis:
            yield Ledger(redis)


# ---- what they cost ----------------------------------------------------------------------------------------------


async def test_no_read_costs_more_when_more_jobs_wait(alone, tmp_path):
    app = create_app(Settings(data_dir=tmp_path), alone)  # no conductor runs: nobody else sends commands
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    first = await World(alone).create_job()
    paths = ["/metrics", "/v1/pools/default", "/v1/doctor", "/v1/models", "/v1/jobs?limit=5", "/v1/jobs?state=FAILED"]
    paths += [f"/v1/jobs/{first}", f"/v1/jobs/{first}:explain", "/v1/jobs?state=PENDING&limit=5"]

    async def num_commands(client, path):
        await alone.redis.config_resetstat()
        assert (await client.get(path)).status_code == 200
        stats = await alone.redis.info("commandstats")
        return sum(
            command["calls"] for name, command in stats.items() if name not in ("cmdstat_config", "cmdstat_ping")
        )

    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        counts: list[dict[str, int]] = []
        for num_more in (110, 0, 300):  # the first time also loads a script
            for _ in range(num_more):
                await World(alone).create_job()
            counts.append({path: await num_commands(client, path) for path in paths})
    assert counts[1] == counts[2]


async def test_conductor_watches_only_the_jobs_that_are_next(alone, tmp_path):
    write_prompts(tmp_path)
    process = DatasetProcess(tmp_path, timeout_s=20, memory_mb=4096)
    conductor = Conductor(alone, process, timeout_s=10)
    job_ids = [await World(alone).create_job() for _ in range(NUM_NEXT + 20)]
    running = asyncio.create_task(conductor.run())
    await asyncio.sleep(1)
    assert set(conductor._watchers) == set(job_ids[:NUM_NEXT])
    assert await alone.trainer.claim_job(job_ids[-1], "trainer-a", 30)
    await eventually("the started job has a watcher", lambda: job_ids[-1] in conductor._watchers)
    assert len(conductor._watchers) == NUM_NEXT + 1
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await process.close()


# ---- their lists -------------------------------------------------------------------------------------------------


async def lists_of(ledger: Ledger, job_id: str, pool: str) -> set[str]:
    names = {"started": keys.ACTIVE_JOBS, "waiting": keys.WAITING_JOBS, "queue": keys.waiting_in(pool)}
    names |= {state: keys.ended_jobs(state) for state in JobState if state.is_final}
    return {set_name for set_name, name in names.items() if await ledger.redis.zscore(name, job_id) is not None}


async def test_lists_follow_the_states(ledger, world, pool):
    job_id = await world.create_job(pool=pool)
    assert await lists_of(ledger, job_id, pool) == {"waiting", "queue"}
    await ledger.trainer.claim_job(job_id, "trainer-a", 30)
    assert await lists_of(ledger, job_id, pool) == {"started"}
    await ledger.jobs.move(job_id, JobState.PAUSED)
    assert await lists_of(ledger, job_id, pool) == {"started"}
    await ledger.jobs.move(job_id, JobState.FAILED, "no model")
    assert await lists_of(ledger, job_id, pool) == {JobState.FAILED}
    assert job_id in await ledger.jobs.ids()
    fields = await ledger.jobs.fields(job_id)
    assert fields["error"] == "no model"
    assert float(fields["finished_at"]) >= float(fields["created_at"])
    await ledger.jobs.delete(job_id)
    assert await lists_of(ledger, job_id, pool) == set()
    cancelled = await world.create_job(pool=pool)
    await ledger.jobs.move(cancelled, JobState.CANCELLED)
    assert await lists_of(ledger, cancelled, pool) == {JobState.CANCELLED}


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING, JobState.SUCCEEDED])
async def test_job_left_in_the_wrong_list_by_a_dead_process_is_moved(ledger, world, pool, state):
    job_id = await world.create_job(pool=pool)
    right = await lists_of(ledger, job_id, pool)
    if state is not JobState.PENDING:
        await ledger.jobs.move(job_id, JobState.RUNNING)
        right = {"started"}
    if state is JobState.SUCCEEDED:
        await ledger.jobs.move(job_id, state)
        right = {state.value}
    await ledger.lists.remove(job_id, pool)
    await ledger.redis.zadd(keys.ALL_JOBS, {job_id: await ledger.now()})
    if state is not JobState.PENDING:  # it had just been claimed, or ended
        for queue in (keys.WAITING_JOBS, keys.waiting_in(pool)):
            await ledger.redis.zadd(queue, {job_id: 1.0})
    await Retention(ledger, 0).step()
    assert await lists_of(ledger, job_id, pool) == right


async def test_trainers_take_the_queue_in_order_and_skip_non_pending(ledger, world, pool):
    hardware = Hardware("a test's processor", "", "native")
    job_ids = [await world.create_job(pool=pool) for _ in range(4)]
    await world.create_job(pool=f"{pool}-other")
    deleted = f"{job_ids[0]}-deleted"
    await ledger.jobs.move(job_ids[1], JobState.CANCELLED)
    for job_id in (deleted, job_ids[1]):
        await ledger.redis.zadd(keys.waiting_in(pool), {job_id: 1.0})
    claimed = []
    for index in range(4):
        claim = await claim_next(TrainerSettings(pool=pool, trainer_id=f"trainer-{index}"), ledger, hardware)
        claimed += [claim[0]] if claim else []
    assert claimed == [job_ids[0], job_ids[2], job_ids[3]]
    assert await ledger.lists.num_waiting(pool) == 0


async def test_pending_job_behind_others_fails_at_its_start_deadline(ledger, world, pool):
    job_id = await world.create_job(pool=pool, schedule={"start_deadline_s": 100.0})
    await ledger.redis.hset(JobKeys(job_id).job, "created_at", await ledger.now() - 1000)
    await Retention(ledger, 0).step()
    fields = await ledger.jobs.fields(job_id)
    assert fields["state"] == JobState.FAILED
    assert fields["error"].startswith("no trainer came for 1000 s (schedule.start_deadline_s)")


async def test_job_is_listed_once_while_others_are_created(ledger, world, tmp_path, monkeypatch):
    for _ in range(6):
        await world.create_job()
    newest = ledger.lists.newest

    async def newest_of_more(*args):
        job_ids = await newest(*args)
        await world.create_job()
        return job_ids

    monkeypatch.setattr("services.broker.api.jobs.JOBS_AT_ONCE", 2)
    monkeypatch.setattr(ledger.lists, "newest", newest_of_more)
    async with running_broker(ledger, tmp_path, is_read_only=True) as broker:
        jobs = (await broker.get("/v1/jobs", params={"limit": 5})).json()["jobs"]
    assert len({job["id"] for job in jobs}) == len(jobs) == 5


async def test_job_that_a_trainer_has_just_taken_does_not_fail(ledger, world, pool):
    job_id = await world.create_job(pool=pool)
    as_seen = await ledger.jobs.fields(job_id)
    assert await ledger.trainer.claim_job(job_id, "trainer-a", 30)
    await fail_if_nobody_comes(ledger, as_seen, deadline_s=0.0)
    assert await ledger.jobs.state(job_id) is JobState.RUNNING


# ---- how many ----------------------------------------------------------------------------------------------------


async def test_resumed_jobs_count_for_the_key_that_submitted_them(ledger, tmp_path):
    keys_file = Keys(tmp_path / "keys.json")
    of_a, of_b = (bearer(keys_file.add(Role.SUBMIT)) for _ in range(2))
    async with running_broker(ledger, tmp_path, api_keys_file=keys_file.path, max_pending_jobs=2) as broker:
        jobs = [(await broker.post("/v1/jobs", json=job_body(), headers=of_a)).json()["id"]]
        for _ in range(2):
            await broker.post(f"/v1/jobs/{jobs[-1]}:cancel", headers=of_a)
            jobs.append((await broker.post("/v1/jobs", json=job_body(), headers=of_a)).json()["id"])
        for job_id, expected in zip(jobs, (200, 429), strict=False):  # the third one is pending
            assert (await broker.post(f"/v1/jobs/{job_id}:resume", headers=of_b)).status_code == expected


async def test_each_key_has_so_many_pending_jobs_and_no_more(ledger, tmp_path):
    keys_file = Keys(tmp_path / "keys.json")
    of_a, of_b = (bearer(keys_file.add(Role.SUBMIT)) for _ in range(2))
    async with running_broker(ledger, tmp_path, api_keys_file=keys_file.path, max_pending_jobs=3) as broker:
        posts = (broker.post("/v1/jobs", json=job_body(seed=seed), headers=of_a) for seed in range(8))
        answers = await asyncio.gather(*posts)
        created = [answer.json()["id"] for answer in answers if answer.status_code == 201]
        assert len(created) == 3
        refused = next(answer for answer in answers if answer.status_code != 201)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) > 0
        assert (
            "at most 3 may be (ONBEAT_MAX_PENDING_JOBS of the broker); wait until some have started"
            in refused.json()["detail"]
        )
        assert (await broker.post("/v1/jobs", json=job_body(), headers=of_b)).status_code == 201
        await broker.post(f"/v1/jobs/{created[0]}:cancel", headers=of_a)
        assert await ledger.trainer.claim_job(created[1], "trainer-a", 30)
        for expected in (201, 201, 429):
            assert (await broker.post("/v1/jobs", json=job_body(), headers=of_a)).status_code == expected


async def test_requests_at_once_to_two_brokers_stay_within_the_limit(ledger, tmp_path):
    keys_file = Keys(tmp_path / "keys.json")
    headers = bearer(keys_file.add(Role.SUBMIT))
    settings = {"api_keys_file": keys_file.path, "max_pending_jobs": 3}
    async with running_broker(ledger, tmp_path, **settings) as a, running_broker(ledger, tmp_path, **settings) as b:
        posts = [
            broker.post("/v1/jobs", json=job_body(seed=seed), headers=headers) for seed in range(6) for broker in (a, b)
        ]
        answers = await asyncio.gather(*posts)
        created = [answer.json()["id"] for answer in answers if answer.status_code == 201]
        assert len(created) == 3
        for job_id in created:
            await a.post(f"/v1/jobs/{job_id}:cancel", headers=headers)
        others = [(await a.post("/v1/jobs", json=job_body(), headers=headers)).json()["id"] for _ in range(2)]
        resumed = await asyncio.gather(
            *(
                broker.post(f"/v1/jobs/{job_id}:resume", headers=headers)
                for job_id, broker in zip(created, (a, b, a), strict=True)
            )
        )
        assert sorted(answer.status_code for answer in resumed) == [200, 429, 429], others


async def test_full_queue_is_seen_in_the_step_that_creates(ledger, world):
    """A look before it would not see the jobs that other brokers create meanwhile."""
    submitter = f"key-{uuid.uuid4().hex[:8]}"
    config = {"name": "n", "pool": "p"}
    ids = [f"job-{uuid.uuid4().hex[:12]}" for _ in range(3)]
    assert await ledger.jobs.create(ids[0], config, 1, 0, submitter, max_pending=1)
    for _ in range(2):  # the second time, the id is listed already
        with pytest.raises(TooManyPending, match="1 jobs of this API key are pending, and at most 1 may be"):
            await ledger.jobs.create(ids[1], config, 1, 0, submitter, max_pending=1)
    assert not await ledger.jobs.create(ids[0], config, 1, 0, submitter, max_pending=1)  # a repeated request
    await ledger.jobs.move(ids[0], JobState.CANCELLED)
    assert await ledger.jobs.create(ids[1], config, 1, 0, submitter, max_pending=1)
    with pytest.raises(TooManyPending):
        await ledger.jobs.resume(ids[0], JobState.CANCELLED, max_pending=1)
    assert await ledger.jobs.state(ids[0]) is JobState.CANCELLED
