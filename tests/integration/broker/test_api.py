"""The REST API of a whole broker on a real Redis: what it accepts, what it refuses, and how it says so."""

import asyncio
import getpass
import json
import tomllib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from onbeat.contracts.records import PublishedWeights, TrainerRecord, WeightUpdate, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.streams import keys
from onbeat.streams.connection import connect
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker import metrics
from services.broker.api import jobs as jobs_api
from services.broker.retention import Retention
from services.trainer.__main__ import candidates
from tests.broker_fixtures import running_broker, submit
from tests.conftest import free_port, unfinished
from tests.waiting import eventually
from tests.world import failed_group, job_body, make_group


def update_of(received_bytes: int, open_s: float | None = None) -> WeightUpdate:
    numbers = {"pull_s": 0.1, "apply_s": 0.05, "load_s": 0.1, "open_s": open_s}
    return WeightUpdate(received_bytes=received_bytes, sources=["h:1"], **numbers)


def problem_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    of_refused_jobs = {"rows"} if body["title"] == "Job refused" and "rows" in body else set()
    assert body.keys() == {"type", "title", "status", "detail", "errors"} | of_refused_jobs
    assert body["status"] == status
    return body


# ---- submit ------------------------------------------------------------------------------------------------------


async def test_submitted_job_is_pending_and_can_be_read_back(broker):
    response = await broker.post("/v1/jobs", json=job_body())
    record = response.json()
    assert response.status_code == 201
    assert response.headers["location"] == f"/v1/jobs/{record['id']}"
    assert (record["state"], record["num_iterations"], record["next_iteration"]) == ("PENDING", 3, 0)
    assert record["config"]["optimizer"]["learning_rate"] == 1e-6  # the defaults that it will run with are filled in
    assert (await broker.get(response.headers["location"])).json() == record


async def test_lists_are_read_in_parts_and_by_state(broker, ledger, world, monkeypatch):
    monkeypatch.setattr(jobs_api, "JOBS_AT_ONCE", 3)
    job_ids = [await world.create_job() for _ in range(8)]
    over, paused = [job_ids[1], job_ids[3]], job_ids[5]
    for job_id in over:
        await ledger.jobs.move(job_id, JobState.CANCELLED)
    for state in (JobState.RUNNING, JobState.PAUSED):
        await ledger.jobs.move(paused, state)
    await ledger.redis.zadd(keys.ALL_JOBS, {"never-created": await ledger.now()})
    newest_first = job_ids[::-1]
    pending = [job_id for job_id in newest_first if job_id not in (*over, paused)]

    async def listed(query):
        known = (await broker.get(f"/v1/jobs?{query}")).json()["jobs"]
        return [job["id"] for job in known if job["id"] in job_ids]

    assert await listed("limit=500") == newest_first
    assert await listed("limit=5") == newest_first[:5]
    assert await listed("state=CANCELLED&limit=500") == over[::-1]
    assert await listed("state=PAUSED&limit=500") == [paused]
    assert await listed("state=RUNNING&limit=500") == []  # though they share a list
    assert await listed("state=PENDING&limit=2") == pending[:2]
    assert await listed("state=PENDING&limit=500") == pending


async def test_same_idempotency_key_is_the_same_job(broker, ledger):
    headers = {"Idempotency-Key": f"key-{id(broker)}"}
    before = set(await ledger.jobs.ids())
    answers = await asyncio.gather(*(broker.post("/v1/jobs", json=job_body(), headers=headers) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {201}
    (job_id,) = {answer.json()["id"] for answer in answers}
    assert set(await ledger.jobs.ids()) - before == {job_id}
    await broker.post(f"/v1/jobs/{job_id}:cancel")
    again = await broker.post("/v1/jobs", json=job_body(), headers=headers)
    assert (again.json()["id"], again.json()["state"]) == (job_id, "CANCELLED")
    other = await broker.post("/v1/jobs", json=job_body(seed=5), headers=headers)
    assert "take a new key" in problem_of(other, 409)["detail"]
    assert job_id not in await unfinished(ledger)


async def test_pattern_that_is_slow_to_compile_holds_up_nobody(broker):
    slow = "(?i)" + "[\\x00-\\U0010ffff]" * 2000
    sections = {"reward": {"name": "regex", "options": {"pattern": slow}}}
    posted = asyncio.create_task(broker.post("/v1/jobs", json=job_body(**sections)))
    num_answers = 0
    while not posted.done():
        await broker.get("/livez")
        num_answers += 1
        await asyncio.sleep(0.05)
    (error,) = problem_of(await posted, 422)["errors"]
    assert error["field"] == "reward.options.pattern"
    assert "takes longer than 2 s" in error["message"]
    assert num_answers > 5  # within the 2 s
    await submit(broker, reward={"name": "regex", "options": {"pattern": "a+"}})


async def test_hub_ids_and_unseen_folders_are_left_to_the_trainer(ledger, tmp_path):
    async with running_broker(ledger, tmp_path, has_model_folders=False) as broker:
        await submit(broker, model={"path": "/only/on/the/trainer"})
        await submit(broker, model={"path": "HuggingFaceTB/SmolLM2-135M"})


@pytest.mark.parametrize(
    "odd",
    [
        {"config": '{"reward": {"options": ' + "[" * 253 + "]" * 253 + "}}"},
        {"config": '{"reward": {"options": {"x": "\\ud800"}}}'},
        {"config": "not JSON"},
        {"config": b"\xff\xfe"},
        {"created_at": "yesterday", "num_iterations": "many"},
        {"state": "EXPLODED"},
    ],
    ids=["deep", "half a character", "no JSON", "no text", "no numbers", "no state"],
)
async def test_unreadable_job_breaks_no_list(broker, ledger, odd):
    odd_id, good_id = await submit(broker), await submit(broker)
    await broker.post(f"/v1/jobs/{odd_id}:cancel")
    await ledger.redis.hset(JobKeys(odd_id).job, mapping=odd)
    listed = {job["id"]: job for job in (await broker.get("/v1/jobs")).json()["jobs"]}
    assert "cannot read the record of the job" in listed[odd_id]["error"]
    assert listed[good_id]["error"] is None
    assert (await broker.get(f"/v1/jobs/{odd_id}")).json() == listed[odd_id]
    await ledger.redis.hset(JobKeys(odd_id).job, "state", "CANCELLED")
    assert (await broker.delete(f"/v1/jobs/{odd_id}")).status_code == 204


@pytest.mark.parametrize(
    ("name", "value"),
    [("state", "EXPLODED"), ("next_iteration", "many"), ("created_at", "x"), ("pool", None), ("config", None)],
)
async def test_unreadable_started_job_breaks_no_read_of_others(broker, ledger, world, name, value):
    odd, good = await submit(broker), await submit(broker)
    for job_id in (odd, good):
        await world.start_training(job_id)
    if value is None:
        await ledger.redis.hdel(JobKeys(odd).job, name)
    else:
        await ledger.redis.hset(JobKeys(odd).job, name, value)
    lists = ("/v1/jobs", "/v1/jobs?state=RUNNING", "/metrics", "/v1/pools/default", "/v1/models", "/v1/doctor")
    for path in (*lists, f"/v1/jobs/{good}"):
        answer = await broker.get(path)
        assert answer.status_code == 200, (path, answer.text)
        assert good in answer.text or path == "/v1/pools/default", path
    await Retention(ledger, 1).step()
    listed = [listed async for listed in candidates(ledger, "default")]
    assert good in dict(listed)
    await world.wait_open(good, 0)


# ---- requests that are no job ------------------------------------------------------------------------------------


def with_option(value: str) -> str:
    return json.dumps(job_body(reward={"name": "exact", "options": {"x": "VALUE"}})).replace('"VALUE"', value)


JSON, TEXT = "application/json", "text/plain"


@pytest.mark.parametrize(
    ("content", "content_type", "sentence"),
    [
        pytest.param(with_option("NaN"), JSON, "not plain JSON", id="no number"),
        pytest.param(with_option("1e999"), JSON, "not plain JSON", id="infinite"),
        pytest.param(with_option(r'"\ud800"'), JSON, "not plain JSON", id="half a character"),
        *(
            pytest.param(place("[" * depth + "]" * depth), JSON, "nested more than 32 levels", id=f"{depth} levels")
            for depth in (33, 253, 900)
            for place in (with_option, '{{"name": {}}}'.format, '{{"nonsense": {}}}'.format)
        ),
        pytest.param("[]", JSON, "JSON object", id="list"),
        pytest.param(json.dumps(job_body()), TEXT, "JSON object", id="text"),
    ],
)
async def test_body_that_is_no_job_is_refused_at_the_door(broker, ledger, content, content_type, sentence):
    before = await ledger.jobs.ids()
    answer = await broker.post("/v1/jobs", content=content, headers={"content-type": content_type})
    assert sentence in problem_of(answer, 422)["errors"][0]["message"]
    assert await ledger.jobs.ids() == before


# ---- a job as TOML -----------------------------------------------------------------------------------------------

TOML_JOB = """name = "from-toml"

[model]
path = "bundled:smollm2-135m-instruct"

[data]
type = "jsonl"
path = "prompts.jsonl"

[reward]
name = "exact"

[rollout]
num_prompts_per_iteration = 2
num_samples_per_prompt = 4
max_response_tokens = 16

[schedule]
num_iterations = 3
"""


async def post_toml(broker: httpx.AsyncClient, text: str | bytes, **headers: str) -> httpx.Response:
    return await broker.post("/v1/jobs", content=text, headers={"content-type": "application/toml"} | headers)


async def test_job_in_toml_is_the_job_in_json(broker):
    headers = {"Idempotency-Key": f"toml-{id(broker)}"}
    first = await post_toml(broker, TOML_JOB, **headers)
    assert first.status_code == 201, first.text
    again = await broker.post("/v1/jobs", json=tomllib.loads(TOML_JOB), headers=headers)
    assert again.json()["id"] == first.json()["id"]
    windows = TOML_JOB.replace("\n", "\r\n").encode("utf-8-sig")
    assert (await post_toml(broker, windows, **headers)).json()["id"] == first.json()["id"]


@pytest.mark.parametrize(
    ("before", "after", "field", "line"),
    [
        ("num_samples_per_prompt = 4", "num_samples_per_prompt = 0", "rollout.num_samples_per_prompt", 15),
        ("max_response_tokens = 16\n", "", "rollout.max_response_tokens", 13),  # the section that lacks it
        ("num_iterations", "num_iteration", "schedule.num_iteration", 19),
        ('"exact"', '"exactly"', "reward.name", 11),  # admission refuses it, not the schema
    ],
)
async def test_refused_toml_names_field_and_line(broker, before, after, field, line):
    answer = problem_of(await post_toml(broker, TOML_JOB.replace(before, after)), 422)
    assert (field, line) in [(error["field"], error["line"]) for error in answer["errors"]]


async def test_refused_json_names_no_line(broker):
    answer = problem_of(await broker.post("/v1/jobs", json=job_body(seed="x")), 422)
    assert [sorted(error) for error in answer["errors"]] == [["field", "message"]]


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ('name = "a"\nseed = \n', 2),
        (b"name = '\xff'", None),
        ("a = " + "[" * 20_000, None),
        (".".join(["a"] * 20_000) + " = 1", None),
        ("x = " + "9" * 5000, None),
        ("# " + "x" * 70_000, None),
    ],
)
async def test_malformed_toml_is_a_problem(broker, body, line):
    answer = problem_of(await post_toml(broker, body), 400)
    assert answer["title"] == "Malformed TOML"
    assert answer["errors"][0].get("line") == line


HUGE = "0x" + "f" * 5000  # only decimal numbers have a limit of digits
AS_REGEX, AS_HTTP = (TOML_JOB.replace('"exact"', f'"{name}"') for name in ("regex", "http"))
GYM = TOML_JOB.replace('type = "jsonl"\npath = "prompts.jsonl"', 'type = "reasoning_gym"\ntask = "chain_sum"')


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (f"seed = {HUGE}\n{TOML_JOB}", "seed"),
        (f"{GYM}\n[data.options]\nmax_terms = {HUGE}", "data.options"),
        (f"{AS_REGEX}\n[reward.options]\npattern = {HUGE}", "reward.options"),
        (f"{AS_HTTP}\n[reward.options]\nservice = {HUGE}", "reward.options"),
    ],
)
async def test_number_of_thousands_of_digits_is_refused(broker, text, field):
    answer = problem_of(await post_toml(broker, text), 422)
    assert field in {error["field"] for error in answer["errors"]}


async def test_large_body_is_refused_announced_or_not(broker, ledger):
    async def drip():
        for _ in range(20):
            yield b" " * 100_000

    before = await ledger.jobs.ids()
    large = job_body(reward={"name": "exact", "options": {"x": "y" * 1_100_000}})
    problem_of(await broker.post("/v1/jobs", json=large), 413)
    headers = {"content-type": "application/json"}
    problem_of(await broker.post("/v1/jobs", content=drip(), headers=headers), 413)
    assert await ledger.jobs.ids() == before


# ---- moves -------------------------------------------------------------------------------------------------------


async def test_unknown_job_is_not_found_everywhere(broker):
    evaluations, rest = ("/evaluations", "/evaluations/0/samples"), ("/weights", "/metrics", "/samples", "/events")
    rest = (*rest, "/groups/0-0")
    for path in ("", "/iterations", *evaluations, *rest, "/timeline", "/stream"):
        assert "there is no job 'nobody'" in problem_of(await broker.get(f"/v1/jobs/nobody{path}"), 404)["detail"]
    for verb in ("cancel", "pause", "resume"):
        problem_of(await broker.post(f"/v1/jobs/nobody:{verb}"), 404)


async def test_waiting_job_is_cancelled_instead_of_paused(broker):
    job_id = await submit(broker)
    detail = problem_of(await broker.post(f"/v1/jobs/{job_id}:pause"), 409)["detail"]
    remedy = "it waits in the queue; only a running job can be paused: cancel it instead"
    assert detail == f"job {job_id} is PENDING: {remedy}"


# ---- what happens in a job ---------------------------------------------------------------------------------------


async def test_iterations_and_metrics_of_a_run(broker, ledger, world):
    job_id = await submit(broker)
    epoch = await world.start_training(job_id)
    for iteration in range(2):
        await world.wait_open(job_id, iteration)
        await ledger.versions.engine_ready(job_id, iteration, "w1", update_of(1000))
        assert len(await world.drain(job_id)) == 2
        numbers = {"prompt_tokens": 12, "response_tokens": 8, "reward_mean": 0.5, "train_s": 0.001}
        await world.commit(job_id, epoch, iteration, **numbers, **{"train/loss": 1.0 + iteration})
    await world.wait_open(job_id, 2)
    first, second, third = (await broker.get(f"/v1/jobs/{job_id}/iterations")).json()["iterations"]
    assert [first["state"], second["state"], third["state"]] == ["COMMITTED", "COMMITTED", "OPEN"]
    for record in (first, second):
        assert record["num_accepted"] == record["num_groups"] == 2
        assert record["wall_s"] > 0
        assert record["tpspd"] == pytest.approx(20 / record["wall_s"] / 2)
        assert 0 <= record["rollout_idle_frac"] <= 1
        assert 0 <= record["trainer_idle_frac"] <= 1
        assert record["weight_sync_s"] >= 0
        assert record["metrics"] == {"train/loss": 1.0 + record["iteration"]}
    assert second["wall_s"] == pytest.approx(second["committed_at"] - first["committed_at"])
    assert third["tpspd"] is None
    later = (await broker.get(f"/v1/jobs/{job_id}/iterations?after=1")).json()["iterations"]
    assert [record["iteration"] for record in later] == [2]
    assert (await broker.get(f"/v1/jobs/{job_id}/iterations?after=7")).json()["iterations"] == []
    series = (await broker.get(f"/v1/jobs/{job_id}/metrics")).json()["metrics"]
    assert series["train/loss"] == [[0, 1.0], [1, 2.0]]
    assert series["iteration/reward_mean"] == [[0, 0.5], [1, 0.5]]
    later = (await broker.get(f"/v1/jobs/{job_id}/metrics?after=0")).json()["metrics"]
    assert later["train/loss"] == [[1, 2.0]]


async def test_samples_of_a_job_without_any(broker, ledger, world):
    job_id = await submit(broker)
    assert (await broker.get(f"/v1/jobs/{job_id}/samples")).json() == {"samples": []}
    await world.start_training(job_id)
    await world.wait_open(job_id, 0)
    for claim in await ledger.rollout.claim(job_id, "w1", 10, 30):
        await ledger.rollout.submit(job_id, claim.entry_id, failed_group(claim.task))
    assert (await broker.get(f"/v1/jobs/{job_id}/samples")).json() == {"samples": []}


async def test_events_are_those_after_the_cursor(broker, ledger):
    job_id = await submit(broker)
    (created,) = (await broker.get(f"/v1/jobs/{job_id}/events")).json()["events"]
    path = f"/v1/jobs/{job_id}/events?after={created['id']}"
    assert (await broker.get(path)).json() == {"events": []}
    await ledger.event_log.emit(job_id, "test.hello", "hello")
    (event,) = (await broker.get(path)).json()["events"]
    assert (event["kind"], event["message"]) == ("test.hello", "hello")


async def test_what_a_pool_has_to_do(broker, ledger, world):
    """An autoscaler asks for the prompts of running jobs, and for the live workers."""

    async def status(pool):
        answer = await broker.get(f"/v1/pools/{pool}")
        assert answer.status_code == 200
        load: dict[str, Any] = answer.json()
        assert load.pop("pool") == pool
        return load

    nothing = {"num_jobs": 0, "num_prompts": 0, "num_unclaimed_prompts": 0, "num_trainers": 0, "num_rollouts": 0}
    nothing["num_starting_trainers"] = 0
    assert await status("scaled") == nothing
    await world.beat("scaled", WorkerRecord(id="w1", state="idle"))
    await world.beat("scaled", WorkerRecord(id="dead", state="idle"), ago_s=60)
    await world.beat("scaled", TrainerRecord(id="t1", state="idle"))
    await world.beat("scaled", TrainerRecord(id="t2", state="stopped"))
    await world.beat("scaled", TrainerRecord(id="t3", state="starting"))
    job_id = await submit(broker, pool="scaled")
    there = {"num_jobs": 1, "num_trainers": 1, "num_starting_trainers": 1, "num_rollouts": 1}
    assert await status("scaled") == nothing | there
    epoch = await world.start_training(job_id)
    await world.wait_open(job_id, 0)
    assert await status("scaled") == nothing | there | {"num_prompts": 2, "num_unclaimed_prompts": 2}
    first, second = await ledger.rollout.claim(job_id, "w1", 10, 30)
    await ledger.rollout.submit(job_id, first.entry_id, make_group(first.task))
    assert await status("scaled") == nothing | there | {"num_prompts": 1}
    await broker.post(f"/v1/jobs/{job_id}:pause")
    assert await status("scaled") == nothing | there
    await broker.post(f"/v1/jobs/{job_id}:resume")
    await ledger.rollout.submit(job_id, second.entry_id, make_group(second.task))
    assert await status("scaled") == nothing | there
    assert await status("default") == await status("default") | {"num_rollouts": 0}
    await world.commit(job_id, epoch, 0)
    problem_of(await broker.get("/v1/pools/No_Pool"), 422)


# ---- health ------------------------------------------------------------------------------------------------------


async def test_health_and_prometheus(broker, ledger, world, monkeypatch, tmp_path):
    assert (await broker.get("/livez")).json() == {"status": "alive"}
    monkeypatch.setenv("ONBEAT_INSTANCE_ID", "4f2a")
    ready = {"status": "ready", "instance_id": "4f2a"}
    assert (await broker.get("/readyz")).json() == ready | {"folder": str(tmp_path), "user": getpass.getuser()}
    for header in ({"Host": "broker.example"}, {"X-Forwarded-For": "192.0.2.1"}, {"Origin": "http://evil.example"}):
        assert (await broker.get("/readyz", headers=header)).json() == ready  # nobody elsewhere learns whose it is
    job_id = await submit(broker)
    epoch = await world.start_training(job_id)
    await world.wait_open(job_id, 0)
    first, second = await ledger.rollout.claim(job_id, "w1", 10, 30)
    await ledger.rollout.submit(job_id, first.entry_id, make_group(first.task, version=4))
    for claim in (first, second, first):
        await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task))
    await world.commit(job_id, epoch, 0)

    async def scrape():
        return (await broker.get("/metrics")).text

    text = await scrape()
    assert f'onbeat_iterations_committed_total{{job_id="{job_id}"}} 1.0' in text
    for outcome, count in {"accepted": 2, "stale": 1, "duplicate": 1, "failed": 0}.items():
        assert f'onbeat_groups_total{{job_id="{job_id}",outcome="{outcome}"}} {count}.0' in text
    assert 'onbeat_jobs{state="RUNNING"}' in text
    assert 'onbeat_http_request_seconds_count{method="POST",route="/v1/jobs",status="201"}' in text
    read = metrics.read_outcomes

    async def read_slowly(*arguments):
        await asyncio.sleep(0.01)
        return await read(*arguments)

    monkeypatch.setattr(metrics, "read_outcomes", read_slowly)
    for iteration in (1, 2):  # counts stay when iterations settle, however many scrape at once
        await world.wait_open(job_id, iteration)
        await world.drain(job_id)
        await world.commit(job_id, epoch, iteration)
        for text in await asyncio.gather(scrape(), scrape(), scrape()):
            assert f'outcome="accepted"}} {2 + 2 * iteration}.0' in text


async def test_bounded_job_shows_open_iterations_and_cost_of_versions(broker, ledger, world):
    job_id = await submit(broker, schedule={"mode": "bounded", "max_staleness": 1})
    epoch = await world.start_training(job_id)
    for iteration in (0, 1):
        await world.wait_open(job_id, iteration)
        await world.drain(job_id)
    await ledger.versions.engine_ready(job_id, 0, "w1", update_of(1000))
    await world.commit(job_id, epoch, 0, staleness_max=0)
    await world.commit(job_id, epoch, 1, staleness_max=1)
    await world.wait_open(job_id, 2)
    await asyncio.sleep(0.1)
    await ledger.versions.engine_ready(job_id, 2, "w1", update_of(1000))
    records = (await broker.get(f"/v1/jobs/{job_id}/iterations")).json()["iterations"]
    assert [(record["iteration"], record["policy_version"], record["staleness_max"]) for record in records] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 2, None),
    ]
    first, second, third = (record["weight_sync_s"] for record in records)
    assert first == second  # the same version
    assert 0.1 < third < 1.0  # since its commit
    job = (await broker.get(f"/v1/jobs/{job_id}")).json()
    assert (job["num_opened"], job["next_iteration"]) == (3, 2)
    samples = (await broker.get(f"/v1/jobs/{job_id}/samples")).json()["samples"]
    assert [sample["iteration"] for sample in samples] == [1] * 4
    assert f'onbeat_groups_total{{job_id="{job_id}",outcome="accepted"}} 4.0' in (await broker.get("/metrics")).text


async def test_weights_by_version_have_trainer_and_rollout_numbers(broker, ledger, world):
    job_id = await submit(broker, schedule={"mode": "bounded", "max_staleness": 2, "num_iterations": 4})
    weights, gauges = f"/v1/jobs/{job_id}/weights", f'{{job_id="{job_id}"}}'
    assert (await broker.get(weights)).json() == {"weights": []}
    epoch = await world.start_training(job_id)
    for iteration in (0, 1, 2):
        await world.wait_open(job_id, iteration)
        await world.drain(job_id)
    await ledger.versions.engine_ready(job_id, 0, "w1", update_of(1000))
    for iteration, version in ((0, 1), (2, 3)):
        published = PublishedWeights(full_bytes=1000, delta_bytes=20, encode_s=0.5, publish_s=0.75)
        await ledger.versions.announce(job_id, epoch, version, "127.0.0.1:1", "d", published)
        if version == 3:
            await world.commit(job_id, epoch, 1, is_published=False)
        await world.commit(job_id, epoch, iteration)
        text = (await broker.get("/metrics")).text  # nobody serves this version yet
        assert f"onbeat_weight_received_bytes{gauges} {1000 if version == 1 else 40}.0" in text
        for worker, open_s in (("w1", 0.5 * version), ("w2", 0.25)):
            await ledger.versions.engine_ready(job_id, version, worker, update_of(20, open_s))
    joined, first, second = (await broker.get(weights)).json()["weights"]
    assert [record["policy_version"] for record in (joined, first, second)] == [0, 1, 3]
    assert (joined["full_bytes"], joined["rollouts"]["w1"]["open_s"]) == (None, None)
    assert second == {
        "policy_version": 3,
        "full_bytes": 1000,
        "delta_bytes": 20,
        "encode_s": 0.5,
        "publish_s": 0.75,
        "rollouts": {"w1": update_of(20, 1.5).model_dump(), "w2": update_of(20, 0.25).model_dump()},
    }
    assert (await broker.get(f"{weights}?after=1")).json()["weights"] == [second]
    assert (await broker.get(f"{weights}?limit=2")).json()["weights"] == [joined, first]
    problem_of(await broker.get(f"{weights}?limit=0"), 422)
    text = (await broker.get("/metrics")).text
    assert f"onbeat_weight_open_seconds{gauges} 1.5" in text  # the slowest rollout
    assert f"onbeat_weight_full_bytes{gauges} 1000.0" in text
    assert f"onbeat_weight_received_bytes{gauges} 40.0" in text


async def test_named_sets_have_scores_series_and_samples(broker, world):
    data = {"type": "jsonl", "path": "prompts.jsonl"}
    sets = [{"name": "easy", "data": data, "num_prompts": 1}, {"name": "hard", "data": data, "solved_at": 2.0}]
    job_id = await submit(broker, evaluation={"sets": sets, "num_prompts": 2, "num_samples_per_prompt": 2})
    await world.start_training(job_id)
    await world.drain_evaluation(job_id, 0)
    (record,) = (await broker.get(f"/v1/jobs/{job_id}/evaluations")).json()["evaluations"]
    assert (record["evaluation"], record["policy_version"], record["state"]) == (0, 0, "DONE")
    assert (record["num_groups"], record["reward_mean"], record["pass_at_k"]) == (3, 0.5, 1.0)
    assert (record["metrics"]["easy/pass_at_k"], record["metrics"]["hard/pass_at_k"]) == (1.0, 0.0)
    assert record["message"] == "reward 0.500 easy, 0.500 hard"
    series = (await broker.get(f"/v1/jobs/{job_id}/metrics")).json()["metrics"]
    assert series["eval/hard/solved_none_frac"] == [[0, 1.0]]
    samples = (await broker.get(f"/v1/jobs/{job_id}/evaluations/0/samples")).json()["samples"]
    assert {sample["group_id"] for sample in samples} == {"eval-0-0", "eval-0-1", "eval-0-2"}
    assert (await broker.get(f"/v1/jobs/{job_id}/evaluations?after=0")).json() == {"evaluations": []}
    assert (await broker.get(f"/v1/jobs/{job_id}/evaluations/9/samples")).json() == {"samples": []}
    assert f'onbeat_groups_total{{job_id="{job_id}",outcome="accepted"}} 2.0' in (await broker.get("/metrics")).text


@pytest_asyncio.fixture
async def unreachable() -> AsyncIterator[Ledger]:
    """Yield a ledger whose Redis is away."""
    client = connect(f"redis://127.0.0.1:{free_port()}", retry_s=1)
    yield Ledger(client)
    await client.aclose()


async def test_answer_while_redis_is_away(unreachable, tmp_path):
    async with running_broker(unreachable, tmp_path) as broker:
        assert "ONBEAT_REDIS_URL" in problem_of(await broker.get("/readyz"), 503)["detail"]
        answer = await broker.get("/v1/jobs")
        assert "Nothing is lost" in problem_of(answer, 503)["detail"]
        assert answer.headers["retry-after"] == "2"
        assert (await broker.get("/livez")).status_code == 200


async def test_broker_is_not_ready_when_its_conductor_gave_up(unreachable, tmp_path):
    async with running_broker(unreachable, tmp_path, redis_retry_s=0.01) as broker:

        async def has_given_up():
            return "control loop has ended" in (await broker.get("/readyz")).text

        await eventually("the conductor gives up", has_given_up)


async def test_refused_redis_command_differs_from_an_unreachable_redis(broker, ledger, caplog):
    """Such as by the data of another version."""
    await ledger.redis.set(JobKeys("odd").job, "text")
    answer = await broker.get("/v1/jobs/odd")
    problem = problem_of(answer, 503)
    assert problem["title"] == "Redis refused a command"
    assert problem["detail"].startswith("WRONGTYPE ")
    assert "another version" in problem["detail"]
    chat = {"model": "odd", "messages": [{"role": "user", "content": "hi"}]}
    refused = await broker.post("/v1/chat/completions", json=chat)
    assert refused.status_code == 503
    assert refused.json()["error"]["message"].startswith("Redis refused a command: WRONGTYPE ")
    assert [line.levelname for line in caplog.records if "WRONGTYPE" in line.getMessage()] == ["ERROR"] * 2
