"""Jobs, weights and samples as REST shows them, built from the ledger's fields. Nothing here writes.

Iterations and evaluations: onbeat/streams/records.py.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from pydantic_core import from_json

from onbeat.config import JobConfig
from onbeat.contracts.records import JobRecord, Sample, WeightsRecord
from onbeat.contracts.section import IS_ACCEPTED
from onbeat.contracts.states import JobState
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, first_iteration
from onbeat.streams.unreadable import JOB, wrong_in_hash
from services.broker.samples import ANY_RESPONSE, Choice, sample_groups


def job_record(fields: Fields) -> JobRecord:
    """Return the job, or as much of it as can be read: one odd job must not take a whole list with it."""
    known = {name: fields[name] for name in JobRecord.model_fields if name in fields}
    try:
        config = from_json(fields["config"])  # it refuses depths and half characters that could not be written again
        return JobRecord.model_validate(known | {"config": config})
    except (ValueError, KeyError) as error:
        return unreadable_record(fields, error)


async def place_in_queue(ledger: Ledger, records: Sequence[JobRecord]) -> None:
    """Note on pending jobs how many go first."""
    pending = [record for record in records if record.state is JobState.PENDING]
    for pool in {record.pool for record in pending}:
        queued = [record for record in pending if record.pool == pool]
        places = await ledger.lists.places(pool, [record.id for record in queued])
        for record, place in zip(queued, places, strict=True):
            record.queue_position = None if place is None else place + 1  # None: its trainer has just come


def unreadable_record(fields: Fields, error: Exception) -> JobRecord:
    reason = wrong_in_hash(JOB, JobKeys(fields.get("id", "")).job, fields) or f"{type(error).__name__}: {error}"
    remedy = "cancel it, and let an admin delete it"
    return JobRecord(
        id=fields.get("id", ""),
        name=fields.get("name", ""),
        pool=fields.get("pool", ""),
        state=fields["state"] if fields["state"] in set(JobState) else JobState.FAILED,
        error=f"this broker cannot read the record of the job ({str(reason).splitlines()[0]}); {remedy}",
        created_at=0.0,
        num_iterations=0,
        config={},
    )


async def read_weights(ledger: Ledger, job_id: str, after: int, limit: int) -> list[WeightsRecord]:
    """Read the published versions above `after`, in order. Raises JobNotFound."""
    job = await ledger.jobs.fields(job_id)
    newest, after = int(job.get("policy_version", "-1")), max(after, first_iteration(job) - 1)
    records: list[WeightsRecord] = []
    for version in range(after + 1, newest + 1):
        if len(records) == limit:
            break
        if (record := await ledger.versions.weights(job_id, version)) is not None:
            records.append(record)
    return records


async def read_samples(
    ledger: Ledger, job_id: str, iteration: int | None, limit: int, offset: int = 0, choice: Choice = ANY_RESPONSE
) -> list[Sample]:
    """Read chosen responses of an iteration (None: the newest with an accepted group); a response is solved as the job
    says. Raises JobNotFound, GroupsTrimmed."""
    job = await ledger.jobs.fields(job_id)
    if iteration is None:
        start = first_iteration(job)
        iteration = max(start, int(job["num_opened"]) - 1)
        while iteration > start and not await has_accepted(ledger, job_id, iteration):
            iteration -= 1
    if choice.is_solved is not None:
        config = JobConfig.model_validate_json(job["config"], context=IS_ACCEPTED)
        choice = replace(choice, solved_at=config.solved_at_by_source)
    groups = await ledger.iterations.accepted_groups(job_id, iteration)
    advantages = await ledger.iterations.advantages(job_id, iteration) if groups else {}
    return sample_groups(groups, limit, offset, choice, advantages)


async def has_accepted(ledger: Ledger, job_id: str, iteration: int) -> bool:
    return int((await ledger.iterations.fields(job_id, iteration)).get("num_accepted", "0")) > 0


async def read_evaluation_samples(ledger: Ledger, job_id: str, evaluation: int) -> list[Sample]:
    """Read the few responses that are kept of an evaluation; none before it is done."""
    fields = await ledger.evaluations.fields(job_id, evaluation)
    return [Sample.model_validate(sample) for sample in json.loads(fields.get("samples", "[]"))]
