"""The search for a field of a job's records that cannot be read, so that an error names it.

Only Onbeat writes these records. But a person may have edited one in Redis, or a process of another version may write
it. Readers do not look at each field for that: a reader that fails asks here why.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Json, TypeAdapter, ValidationError, create_model

from onbeat.contracts.records import (
    EvaluationRecord,
    IterationRecord,
    JobRecord,
    Sample,
    WeightsRecord,
    WeightUpdate,
)
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.scripts import as_text

LOOK_S = 10.0
NUMBERS_AT_ONCE = 100
MAX_SHOWN = 60  # characters of a value
# Readers of such records raise these.
MISREAD = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class StoredConfig(BaseModel):
    """The sections of a job's configuration that readers of its records need; another version may have others."""

    model_config = ConfigDict(extra="ignore")

    schedule: dict[str, Any]
    rollout: dict[str, Any]
    evaluation: dict[str, Any] | None = None


def hash_of(record: type[BaseModel], /, **stored: Any) -> type[BaseModel]:
    """Return the model of a hash that holds the record's fields, and these: name -> (type, default)."""
    hash_model: type[BaseModel] = create_model(f"{record.__name__}Hash", __base__=record, **stored)
    return hash_model


JOB = hash_of(
    JobRecord,
    config=(Json[StoredConfig], ...),
    max_staleness=(int, ...),
    epoch=(int, 0),
    num_trimmed=(int, 0),
    checkpoint_iteration=(int, 0),
    next_evaluation=(int, 0),
    progress_at=(float, 0.0),
    last_commit_at=(float, 0.0),
    lease_until=(float, 0.0),
    doing_since=(float, 0.0),
    worked_s=(float, 0.0),
)
ITERATION = hash_of(IterationRecord, metrics=(Json[dict[str, Any]], "{}"), previous_commit_at=(float, 0.0))
EVALUATION = hash_of(EvaluationRecord, scores=(Json[dict[str, float]], "{}"), samples=(Json[list[Sample]], "[]"))
PUBLISHED: TypeAdapter[Any] = TypeAdapter(Json[hash_of(WeightsRecord, policy_version=(int, 0))])  # type: ignore[misc]
UPDATE: TypeAdapter[Any] = TypeAdapter(Json[WeightUpdate])
ADVANTAGES: TypeAdapter[Any] = TypeAdapter(Json[list[float | None]])
NUMBER, TIME = TypeAdapter(int), TypeAdapter(float)


@dataclass(frozen=True)
class Unreadable:
    """A field of a hash that cannot be read."""

    key: str
    field: str
    problem: str

    def __str__(self) -> str:
        return f"the field {self.field} of {self.key} in Redis {self.problem}"


async def find_unreadable(ledger: Ledger, job_id: str) -> Unreadable | None:
    """Return the first field of the job's records that cannot be read; None if there is none, or it takes too long."""
    try:
        async with asyncio.timeout(LOOK_S):
            async for unreadable in unreadable_fields(ledger, JobKeys(job_id)):
                return unreadable
    except TimeoutError:
        pass
    return None


async def unreadable_fields(ledger: Ledger, job: JobKeys) -> AsyncIterator[Unreadable]:
    """Yield a field of each record that cannot be read. Without the job's own, nothing else can be looked at.

    Events are left out: one that cannot be read is shown as such.
    """
    fields = as_text(await ledger.redis.hgetall(job.job))
    if (unreadable := wrong_in_hash(JOB, job.job, fields)) is not None:
        yield unreadable
        return
    versions = as_text(await ledger.redis.hgetall(job.versions))
    for name, value in versions.items():
        if unreadable := wrong_value(NUMBER, job.versions, name, name) or wrong_value(TIME, job.versions, name, value):
            yield unreadable
    for number in range(int(fields.get("first_iteration", "0")), int(fields["num_opened"]) + 1, NUMBERS_AT_ONCE):
        last = min(number + NUMBERS_AT_ONCE, int(fields["num_opened"]) + 1)
        async for unreadable in unreadable_units(ledger, job, range(number, last)):
            yield unreadable


async def unreadable_units(ledger: Ledger, job: JobKeys, numbers: range) -> AsyncIterator[Unreadable]:
    """Yield a field of each record of these iterations, evaluations and policy versions that cannot be read."""
    kinds = (job.iteration, job.evaluation, job.weights, job.busy, job.advantages)
    pipeline = ledger.redis.pipeline(transaction=False)
    keys = [kind(number) for number in numbers for kind in kinds]
    for key in keys:
        pipeline.hgetall(key)
    stored = iter(zip(keys, map(as_text, await pipeline.execute()), strict=True))
    for _ in numbers:
        for model in (ITERATION, EVALUATION):
            key, fields = next(stored)
            if fields and (unreadable := wrong_in_hash(model, key, fields)):
                yield unreadable
        for adapter_of in (weights_adapter, lambda _: TIME, lambda _: ADVANTAGES):
            key, fields = next(stored)
            for name, value in fields.items():
                adapter = adapter_of(name)
                if adapter is not None and (unreadable := wrong_value(adapter, key, name, value)):
                    yield unreadable


def weights_adapter(name: str) -> TypeAdapter[Any] | None:
    """Return how a field of a version's weights is read; None for text."""
    return None if name == "digest" else PUBLISHED if name == "published" else UPDATE


def wrong_in_hash(model: type[BaseModel], key: str, fields: Mapping[str, str]) -> Unreadable | None:
    """Return the first field of a hash that is not as in the model."""
    try:
        model.model_validate(fields)
    except ValidationError as error:
        return unreadable_by(error, key)
    return None


def wrong_value(adapter: TypeAdapter[Any], key: str, name: str, value: str) -> Unreadable | None:
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        return unreadable_by(error, key, name)
    return None


def unreadable_by(error: ValidationError, key: str, *above: str) -> Unreadable:
    """Return the field of the first of the errors, with its value as JSON. `above`: names that its location lacks."""
    first = error.errors(include_url=False)[0]
    name = ".".join(map(str, (*above, *first["loc"])))
    if first["type"] == "missing":
        return Unreadable(key, name, "is missing")
    shown = json.dumps(first["input"], default=str)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
    return Unreadable(key, name, f"is {shown}: {first['msg'][:1].lower()}{first['msg'][1:]}")
