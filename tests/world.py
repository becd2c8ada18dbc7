"""The rig of the ledger's tests: small jobs, and the moves of the broker, the trainer and the rollout on them."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from onbeat.config import JobConfig
from onbeat.contracts.records import TrainerRecord, WorkerRecord
from onbeat.contracts.states import EvaluationState, IterationState, Verdict
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
from tests.waiting import eventually

LEASE_S = 30.0


def job_body(**sections: Any) -> dict[str, Any]:
    """Return a valid job on `prompts.jsonl`. Given sections are merged into it, or replace one of another type."""
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


def tasks_for(iteration: int, num_groups: int = 2) -> list[PromptTask]:
    return [PromptTask(group_id=f"{iteration}-{i}", iteration=iteration, text=f"prompt {i}") for i in range(num_groups)]


def make_group(task: PromptTask, worker: str = "w1", version: int | None = None) -> RolloutGroup:
    version = task.policy_version if version is None else version
    return RolloutGroup(
        group_id=task.group_id,
        iteration=task.iteration,
        is_evaluation=task.is_evaluation,
        source=task.source,
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
        source=task.source,
        policy_version=task.policy_version,
        failure=GroupFailure(kind="reward_failed", message="it raised"),
        worker_id=worker,
    )


@dataclass(frozen=True)
class World:
    """A ledger on which a test is the trainer or the rollout of a job, and mostly says only which job it is."""

    ledger: Ledger

    async def create_job(self, **sections: Any) -> str:
        config = JobConfig.model_validate(job_body(**sections))
        job_id = f"job-{uuid.uuid4().hex[:12]}"
        num_iterations = config.schedule.num_iterations
        assert await self.ledger.jobs.create(
            job_id, config.model_dump(mode="json"), num_iterations, config.max_staleness
        )
        return job_id

    async def start_training(self, job_id: str, lease_s: float = LEASE_S) -> str:
        """Be the trainer: claim the job and publish version 0. Return the epoch."""
        epoch = await self.ledger.trainer.claim_job(job_id, "trainer-a", lease_s)
        assert epoch is not None
        await self.ledger.versions.announce(job_id, epoch, 0, "127.0.0.1:1", "d0")
        return epoch

    async def started_job(self, **sections: Any) -> tuple[str, str]:
        """Create a job whose trainer has published version 0. Return its id and the epoch."""
        job_id = await self.create_job(**sections)
        return job_id, await self.start_training(job_id)

    async def wait_open(self, job_id: str, iteration: int) -> None:
        state = partial(self.ledger.iterations.state, job_id, iteration)
        await eventually(f"iteration {iteration} is open", state, IterationState.OPEN)

    async def open_job(self, num_groups: int = 2) -> tuple[str, str]:
        """Start a job and open its iteration 0. Return its id and the epoch."""
        job_id, epoch = await self.started_job()
        assert await self.ledger.iterations.open(job_id, 0, 0, tasks_for(0, num_groups)) == ""
        return job_id, epoch

    async def claim_all(self, job_id: str, worker: str = "w1", count: int = 100) -> list[Claim]:
        return await self.ledger.rollout.claim(job_id, worker, count, LEASE_S)

    async def submit_groups(self, job_id: str, claims: Iterable[Claim], worker: str = "w1") -> None:
        """Submit a group for each claim, all of which are accepted."""
        for claim in claims:
            group = make_group(claim.task, worker)
            assert await self.ledger.rollout.submit(job_id, claim.entry_id, group) is Verdict.ACCEPTED

    async def beat(self, pool: str, record: TrainerRecord | WorkerRecord, ago_s: float = 0.0) -> None:
        """Be a trainer or rollout that was last seen some time ago."""
        key = keys.trainers(pool) if isinstance(record, TrainerRecord) else keys.workers(pool)
        seen = record.model_copy(update={"last_seen_at": await self.ledger.now() - ago_s})
        await self.ledger.redis.hset(key, record.id, seen.model_dump_json())

    async def drain(self, job_id: str) -> list[PromptTask]:
        """Be a rollout: claim all prompts and submit their groups. Return the prompts."""
        claims = await self.claim_all(job_id)
        for claim in claims:
            await self.ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task))
        return [claim.task for claim in claims]

    async def drain_until(
        self, job_id: str, read: Callable[[], Awaitable[Any]], expected: object, timeout_s: float = 10.0
    ) -> list[PromptTask]:
        """Be a rollout until `read` returns what is expected. Return the prompts."""
        tasks: list[PromptTask] = []

        async def drain_and_read() -> Any:
            tasks.extend(await self.drain(job_id))
            return await read()

        await eventually(f"all prompts of {job_id} are served", drain_and_read, expected, timeout_s)
        return tasks

    async def drain_evaluation(self, job_id: str, evaluation: int, timeout_s: float = 10.0) -> list[PromptTask]:
        state = partial(self.ledger.evaluations.state, job_id, evaluation)
        return await self.drain_until(job_id, state, EvaluationState.DONE, timeout_s)

    async def commit(
        self, job_id: str, epoch: str, iteration: int, *, is_published: bool = True, **metrics: float
    ) -> bool:
        version, digest = iteration + 1, f"d{iteration + 1}"
        groups = await self.ledger.iterations.accepted_groups(job_id, iteration)
        used = used_digest({group.group_id: group_digest(group) for group in groups})
        advantages = {g.group_id: [response.reward - 0.5 for response in g.responses] for g in groups if g.responses}
        report = (metrics, used, is_published, advantages)
        return await self.ledger.trainer.commit(job_id, epoch, iteration, version, digest, *report)

    async def run_iteration(self, job_id: str, epoch: str, iteration: int, **metrics: float) -> None:
        """Be broker, rollout and trainer of an iteration."""
        assert await self.ledger.iterations.open(job_id, iteration, iteration, tasks_for(iteration)) == ""
        await self.drain(job_id)
        assert await self.commit(job_id, epoch, iteration, **metrics)

    async def train(self, job_id: str, epoch: str, iterations: range, rollout_s: float = 0.0) -> None:
        """Be rollout and trainer of these iterations, each of which a broker opens."""
        for iteration in iterations:
            await self.wait_open(job_id, iteration)
            await asyncio.sleep(rollout_s)
            await self.drain(job_id)
            assert await self.commit(job_id, epoch, iteration, reward_mean=0.5, **{"train/loss": 1.0 + iteration})
