"""Small jobs, and the trainer's and the rollout's moves on the ledger, for tests of the broker."""

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp

from onbeat.config import JobConfig
from onbeat.contracts.records import TrainerRecord, WorkerRecord
from onbeat.contracts.states import EvaluationState, IterationState, Verdict
from onbeat.process.api_keys import Role, keys_to_edit, new_key
from onbeat.streams import keys
from onbeat.streams.codec import (
    GroupFailure,
    PromptTask,
    Response,
    RolloutGroup,
    Timings,
    VersionSpan,
    group_digest,
    used_digest,
)
from onbeat.streams.ledger import Claim, Ledger
from services.broker.app import create_app
from services.broker.connection import connection_class
from services.broker.settings import Settings
from services.broker.views.live import JobStreams
from tests.conftest import free_port
from tests.waiting import eventually, wait_until

LEASE_S = 30.0


def job_body(**sections: Any) -> dict[str, Any]:
    """A valid job on `prompts.jsonl`; sections given here are merged into it, or replace one of another type."""
    body: dict[str, Any] = {
        "name": "test",
        "model": {"path": "bundled:smollm2-135m-instruct"},
        "data": {"type": "jsonl", "path": "prompts.jsonl"},
        "reward": {"name": "exact"},
        "rollout": {"num_prompts_per_iteration": 2, "num_samples_per_prompt": 2, "max_response_tokens": 8},
        "schedule": {"num_iterations": 3},
    }
    for name, value in sections.items():
        is_merged = isinstance(value, dict) and name in body and value.get("type") in (None, body[name].get("type"))
        body[name] = body[name] | value if is_merged else value
    return body


def write_prompts(data_dir: Path) -> None:
    rows = [{"prompt": f"say {i}", "answer": str(i), "level": i} for i in range(5)]
    (data_dir / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.asynccontextmanager
async def running_broker(ledger: Ledger, data_dir: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The whole application, conductor included, without a socket."""
    write_prompts(data_dir)
    app = create_app(Settings(data_dir=data_dir, **settings), ledger)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
    async with app.router.lifespan_context(app), client:
        yield client


class Server(uvicorn.Server):
    """In this process, so that a test can look into it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Broker:
    url: str
    streams: JobStreams
    server: Server

    @property
    def num_watchers(self) -> int:
        return self.streams._num_watchers


@contextlib.asynccontextmanager
async def serving(
    ledger: Ledger,
    folder: Path,
    stall_s: float = 30.0,
    port: int = 0,
    has_conductor: bool = True,
    wire: Callable[[ASGIApp], ASGIApp] = lambda app: app,
    **more: Any,
) -> AsyncIterator[Broker]:
    """The whole application at a port of this machine, behind a `wire`."""
    write_prompts(folder)
    port = port or free_port()
    settings = Settings(data_dir=folder, port=port, **more)
    app = create_app(settings, ledger, is_stopping=lambda: server.should_exit)
    options: dict[str, Any] = {"http": connection_class(stall_s), "lifespan": "on" if has_conductor else "off"}
    config = uvicorn.Config(wire(app), port=port, log_config=None, ws="none", timeout_graceful_shutdown=5, **options)
    server = Server(config)
    running = asyncio.create_task(server.serve())
    await eventually("the broker serves", lambda: server.started)
    try:
        yield Broker(f"http://127.0.0.1:{port}", app.state.context.streams, server)
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, 30.0)


def start_service(service: str, folder: Path, **env: str) -> subprocess.Popen[bytes]:
    """Start a service as its users do; its log is `folder/log`."""
    names = {f"ONBEAT_{name}": value for name, value in env.items()} | {"ONBEAT_DATA_DIR": str(folder)}
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", f"services.{service}"]
        return subprocess.Popen(command, env=os.environ | names, stdout=log, stderr=log)


@contextlib.contextmanager
def broker_process(
    folder: Path, redis_url: str, trusted: ssl.SSLContext | bool = True, **env: str
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL and the process of a broker that is ready."""
    write_prompts(folder)
    port = free_port()
    url = f"{'https' if 'TLS_CERT' in env else 'http'}://127.0.0.1:{port}"
    process = start_service("broker", folder, REDIS_URL=redis_url, PORT=str(port), **env)

    def is_ready() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/readyz", verify=trusted, trust_env=False).status_code == 200
        return False

    try:
        wait_until(is_ready, "the broker is ready", 60.0)
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class Keys:
    """A keys file, and the keys that are in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_role = {role: self.add(role) for role in Role}

    def add(self, role: Role, lifetime: timedelta | None = None) -> str:
        key, entry = new_key(f"{role}-of-test", role, lifetime)
        with keys_to_edit(self.path) as keys:
            keys.append(entry)
        return key

    def revoke(self, key: str) -> None:
        with keys_to_edit(self.path) as keys:
            keys[:] = [entry for entry in keys if entry.id != key.split("_")[1]]

    def header(self, role: Role) -> dict[str, str]:
        return bearer(self.by_role[role])


async def submit(broker: httpx.AsyncClient, **sections: Any) -> str:
    """Submit a job over REST; returns its id."""
    answer = await broker.post("/v1/jobs", json=job_body(**sections))
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


async def create_job(ledger: Ledger, **sections: Any) -> str:
    config = JobConfig.model_validate(job_body(**sections))
    job_id = f"job-{uuid.uuid4().hex[:12]}"
    num_iterations = config.schedule.num_iterations
    assert await ledger.jobs.create(job_id, config.model_dump(mode="json"), num_iterations, config.max_staleness)
    return job_id


async def start_training(ledger: Ledger, job_id: str, lease_s: float = LEASE_S) -> str:
    """Be the trainer: claim the job and publish version 0; returns the epoch."""
    epoch = await ledger.trainer.claim_job(job_id, "trainer-a", lease_s)
    assert epoch is not None
    await ledger.versions.announce(job_id, epoch, 0, "127.0.0.1:1", "d0")
    return epoch


async def started_job(ledger: Ledger, **sections: Any) -> tuple[str, str]:
    """A job with a trainer, which has published version 0. Returns (job id, epoch)."""
    job_id = await create_job(ledger, **sections)
    return job_id, await start_training(ledger, job_id)


async def wait_open(ledger: Ledger, job_id: str, iteration: int) -> None:
    state = partial(ledger.iterations.state, job_id, iteration)
    await eventually(f"iteration {iteration} is open", state, IterationState.OPEN)


def tasks_for(iteration: int, num_groups: int = 2) -> list[PromptTask]:
    return [PromptTask(group_id=f"{iteration}-{i}", iteration=iteration, text=f"prompt {i}") for i in range(num_groups)]


async def open_job(ledger: Ledger, num_groups: int = 2) -> tuple[str, str]:
    """A running job with iteration 0 open; returns (job id, epoch)."""
    job_id, epoch = await started_job(ledger)
    assert await ledger.iterations.open(job_id, 0, 0, tasks_for(0, num_groups)) == ""
    return job_id, epoch


def make_group(task: PromptTask, worker: str = "w1", version: int | None = None) -> RolloutGroup:
    version = task.policy_version if version is None else version
    return RolloutGroup(
        group_id=task.group_id,
        iteration=task.iteration,
        is_evaluation=task.is_evaluation,
        policy_version=version,
        prompt_token_ids=[1, 2, 3],
        prompt_text=f"prompt of {task.group_id}",
        responses=[
            Response(
                token_ids=[4, 5],
                rollout_logprobs=[-0.5, -0.25],
                version_spans=[VersionSpan(policy_version=version, start=0, end=2)],
                finish_reason="stop",
                reward=float(sample),
                text=f"response {sample}",
            )
            for sample in range(2)
        ],
        timings=Timings(generate_s=0.1, score_s=0.1, worker_busy_s=0.2),
        worker_id=worker,
    )


def failed_group(task: PromptTask, worker: str = "w1") -> RolloutGroup:
    return RolloutGroup(
        group_id=task.group_id,
        iteration=task.iteration,
        is_evaluation=task.is_evaluation,
        policy_version=task.policy_version,
        failure=GroupFailure(kind="reward_failed", message="it raised"),
        worker_id=worker,
    )


async def claim_all(ledger: Ledger, job_id: str, worker: str = "w1", count: int = 100) -> list[Claim]:
    return await ledger.rollout.claim(job_id, worker, count, LEASE_S)


async def submit_groups(ledger: Ledger, job_id: str, claims: Iterable[Claim], worker: str = "w1") -> None:
    """Submit a group for each claim; all of them are accepted."""
    for claim in claims:
        assert await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task, worker)) is Verdict.ACCEPTED


async def beat(ledger: Ledger, pool: str, record: TrainerRecord | WorkerRecord, ago_s: float = 0.0) -> None:
    """Be a trainer or rollout that was last seen some time ago."""
    key = keys.trainers(pool) if isinstance(record, TrainerRecord) else keys.workers(pool)
    seen = record.model_copy(update={"last_seen_at": await ledger.now() - ago_s})
    await ledger.redis.hset(key, record.id, seen.model_dump_json())


async def drain(ledger: Ledger, job_id: str) -> list[PromptTask]:
    """Be a rollout: claim and submit whatever is there; returns the tasks."""
    claims = await claim_all(ledger, job_id)
    for claim in claims:
        await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task))
    return [claim.task for claim in claims]


async def drain_until(
    ledger: Ledger, job_id: str, read: Callable[[], Awaitable[Any]], expected: object, timeout_s: float = 10.0
) -> list[PromptTask]:
    """Be a rollout until `read` gives what is expected; returns the tasks."""
    tasks: list[PromptTask] = []

    async def drain_and_read() -> Any:
        tasks.extend(await drain(ledger, job_id))
        return await read()

    await eventually(f"all prompts of {job_id} are served", drain_and_read, expected, timeout_s)
    return tasks


async def drain_evaluation(ledger: Ledger, job_id: str, evaluation: int, timeout_s: float = 10.0) -> list[PromptTask]:
    state = partial(ledger.evaluations.state, job_id, evaluation)
    return await drain_until(ledger, job_id, state, EvaluationState.DONE, timeout_s)


async def commit(
    ledger: Ledger, job_id: str, epoch: str, iteration: int, *, is_published: bool = True, **metrics: float
) -> bool:
    version, digest = iteration + 1, f"d{iteration + 1}"
    groups = await ledger.iterations.accepted_groups(job_id, iteration)
    used = used_digest({group.group_id: group_digest(group) for group in groups})
    advantages = {g.group_id: [response.reward - 0.5 for response in g.responses] for g in groups if g.responses}
    report = (metrics, used, is_published, advantages)
    return await ledger.trainer.commit(job_id, epoch, iteration, version, digest, *report)


async def run_iteration(ledger: Ledger, job_id: str, epoch: str, iteration: int, **metrics: float) -> None:
    """Be broker, rollout and trainer of an iteration."""
    assert await ledger.iterations.open(job_id, iteration, iteration, tasks_for(iteration)) == ""
    await drain(ledger, job_id)
    assert await commit(ledger, job_id, epoch, iteration, **metrics)


async def train(ledger: Ledger, job_id: str, epoch: str, iterations: range, rollout_s: float = 0.0) -> None:
    """Be rollout and trainer of these iterations, each of which a broker opens."""
    for iteration in iterations:
        await wait_open(ledger, job_id, iteration)
        await asyncio.sleep(rollout_s)
        await drain(ledger, job_id)
        assert await commit(ledger, job_id, epoch, iteration, reward_mean=0.5, **{"train/loss": 1.0 + iteration})
