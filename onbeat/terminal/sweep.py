"""The jobs of a sweep on a broker: created, waited for, and summed up in one table."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from statistics import fmean, stdev
from typing import Any

from onbeat.client import AsyncClient
from onbeat.config.variations import SEED, Variation
from onbeat.contracts.errors import ApiError
from onbeat.contracts.records import JobRecord
from onbeat.contracts.states import EvaluationState, IterationState, JobState
from onbeat.terminal.formatting import duration, number

LOOK_S = 2.0
NUM_LAST = 5  # iterations whose mean reward stands for the end of a job


@dataclass(frozen=True)
class Outcome:
    """A job of the sweep as it stands."""

    varied: dict[str, str]
    job: JobRecord
    reward: float | None  # mean of the last NUM_LAST iterations
    held_out: float | None  # mean reward of the last evaluation

    @property
    def seconds(self) -> float | None:
        if self.job.started_at is None:
            return None
        return (self.job.finished_at or time.time()) - self.job.started_at

    def as_json(self) -> dict[str, Any]:
        shown = ("id", "name", "state", "next_iteration", "num_iterations", "error")
        record = self.job.model_dump(mode="json")
        measured = {"reward_mean": self.reward, "held_out": self.held_out, "seconds": self.seconds}
        return {name: record[name] for name in shown} | {"varied": self.varied} | measured


async def submit(client: AsyncClient, variations: Sequence[Variation]) -> list[JobRecord]:
    """Create the jobs that are not there yet. Raise ValueError for one that is not valid, before any is created."""
    for variation in variations:
        try:
            await client.jobs.validate(variation.job)
        except ApiError as refusal:
            if refusal.status != HTTPStatus.UNPROCESSABLE_ENTITY:
                raise
            raise ValueError(f"no job was created, because of {variation.job['name']}: {refusal}") from refusal
    return [await client.jobs.create(variation.job, variation.idempotency_key) for variation in variations]


async def wait(client: AsyncClient, jobs: Sequence[JobRecord], report: Callable[[str], None]) -> list[JobRecord]:
    """Wait until all jobs are over, and report each change of a state. Return the jobs."""
    known = {job.id: job for job in jobs}
    reported: dict[str, JobState] = {}
    while True:
        for job_id, job in known.items():
            if not job.state.is_final:
                known[job_id] = job = await client.jobs.get(job_id)
            if reported.get(job_id, JobState.PENDING) != job.state:
                num_over = sum(other.state.is_final for other in known.values())
                report(f"{num_over} of {len(known)} are over: {job.name} ({job.id}) is {describe_state(job)}")
            reported[job_id] = job.state
        if all(job.state.is_final for job in known.values()):
            return list(known.values())
        await asyncio.sleep(LOOK_S)


def describe_state(job: JobRecord) -> str:
    text = f"{job.state} after {job.next_iteration} of {job.num_iterations} iterations"
    if job.state is JobState.PAUSED:
        return f"{text}: it waits for `onbeat jobs resume {job.id}`"
    return f"{text}: {job.error}" if job.error else text


async def measure(client: AsyncClient, variations: Sequence[Variation], jobs: Sequence[JobRecord]) -> list[Outcome]:
    return [
        Outcome(variation.varied, job, *await read_rewards(client, job))
        for variation, job in zip(variations, jobs, strict=True)
    ]


async def read_rewards(client: AsyncClient, job: JobRecord) -> tuple[float | None, float | None]:
    """Return the mean reward of the last iterations, and that of the last evaluation; None where there is none."""
    records = await client.jobs.iterations(job.id, after=max(job.first_iteration, job.next_iteration - NUM_LAST) - 1)
    rewards = [
        record.reward_mean
        for record in records
        if record.state is IterationState.COMMITTED and record.reward_mean is not None
    ]
    evaluations = await client.jobs.evaluations(job.id)
    scores = [record.reward_mean for record in evaluations if record.state is EvaluationState.DONE]
    return (fmean(rewards) if rewards else None), (scores[-1] if scores else None)


def table(outcomes: Sequence[Outcome]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows: a row for each job, and under the seeds of a combination one with their mean."""
    keys = list(outcomes[0].varied)
    has_held_out = any(outcome.held_out is not None for outcome in outcomes)
    titles = [*keys, f"reward (last {NUM_LAST})", *["held out"] * has_held_out, "state", "iterations", "time", "id"]
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(tuple(value for key, value in outcome.varied.items() if key != SEED), []).append(outcome)
    rows = []
    for group in groups.values():
        rows += [row(outcome, has_held_out) for outcome in group]
        if SEED in keys and len(group) > 1:
            means = [spread([outcome.reward for outcome in group])]
            means += [spread([outcome.held_out for outcome in group])] if has_held_out else []
            values = ["mean" if key == SEED else group[0].varied[key] for key in keys]
            rows.append([*values, *means, "", "", "", ""])
    return titles, rows


def row(outcome: Outcome, has_held_out: bool) -> list[str]:
    job, held_out = outcome.job, [number(outcome.held_out, ".3f")] if has_held_out else []
    ran = duration(outcome.seconds) if outcome.seconds is not None else "-"
    done = f"{job.next_iteration}/{job.num_iterations}"
    return [*outcome.varied.values(), number(outcome.reward, ".3f"), *held_out, job.state.value, done, ran, job.id]


def spread(values: Sequence[float | None]) -> str:
    """Return mean and standard deviation over the seeds that have a value.

    >>> spread([0.5, 0.7, None]), spread([0.5]), spread([None])
    ('0.600 ± 0.141', '0.500', '-')
    """
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return number(known[0] if known else None, ".3f")
    return f"{fmean(known):.3f} ± {stdev(known):.3f}"
