"""REST of jobs: submit them, read them, and move them along their state machine."""

import contextlib
import hashlib
import secrets
import time
from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException

from onbeat.config import JobConfig
from onbeat.config.schedule import MAX_NUM_ITERATIONS
from onbeat.config.templates import moment_of
from onbeat.contracts.errors import IllegalTransition, JobNotFound
from onbeat.contracts.records import (
    MAX_LISTED_ITERATIONS,
    MAX_LISTED_JOBS,
    AuditReport,
    EvaluationRecord,
    Event,
    IterationRecord,
    JobRecord,
    MetricSeries,
    Validation,
    WeightsRecord,
    WorkerRecord,
)
from onbeat.contracts.section import IS_ACCEPTED
from onbeat.contracts.states import JobState
from onbeat.process.api_keys import ApiKey
from onbeat.streams.inspection import existing_jobs
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import evaluation_series, metric_series, read_evaluations, read_iterations
from services.broker.admission.quota import ANYBODY
from services.broker.admission.resume import resume_over
from services.broker.admission.warm_start import count_epochs
from services.broker.api.context import Broker
from services.broker.api.problems import documented
from services.broker.api.review import review
from services.broker.api.toml_body import MEDIA_TYPE as TOML
from services.broker.api.toml_body import TomlRoute
from services.broker.auditor import run_audit
from services.broker.auth import CALLER
from services.broker.datasets.choice import inherited_outcomes
from services.broker.views.records import job_record, place_in_queue, read_weights

router = APIRouter(prefix="/v1", tags=["jobs"], responses=documented(422, 503), route_class=TomlRoute)

MAX_TRIES = 5
JOBS_AT_ONCE = 100  # jobs of a list, read in one round trip
CURSOR = r"^[0-9]{1,16}(-[0-9]{1,16})?$"  # an event's id; \d would be the digits of all scripts

# FastAPI describes the JSON body by itself.
AS_TOML = {"requestBody": {"content": {TOML: {"schema": {"$ref": "#/components/schemas/JobConfig"}}}}}

JobId = Annotated[str, Path(max_length=200, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class JobList(BaseModel):
    jobs: list[JobRecord]


class IterationList(BaseModel):
    iterations: list[IterationRecord]


class EvaluationList(BaseModel):
    evaluations: list[EvaluationRecord]


class WeightsList(BaseModel):
    weights: list[WeightsRecord]


class EventList(BaseModel):
    events: list[Event]


class WorkerList(BaseModel):
    workers: list[WorkerRecord]


class Resumption(BaseModel):
    """Changes to a job when it is resumed."""

    model_config = ConfigDict(extra="forbid")

    num_iterations: int | None = Field(
        None,
        ge=1,
        le=MAX_NUM_ITERATIONS,
        description="new total number of iterations of a job that SUCCEEDED; more than it had",
    )


# ---- submit and look ---------------------------------------------------------------------------------------------


@router.post("/jobs", status_code=201, responses=documented(400, 409, 413), openapi_extra=AS_TOML)
async def create_job(
    config: JobConfig,
    broker: Broker,
    request: Request,
    response: Response,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=255)] = None,
) -> JobRecord:
    """Submit a job as JSON or TOML.

    A request with the Idempotency-Key of an earlier one, and the same job, returns that job and creates none.
    """
    submitter, ledger, asked = submitter_of(request), broker.ledger, config
    job_id = choose_job_id(idempotency_key, submitter)
    response.headers["Location"] = f"/v1/jobs/{job_id}"
    with contextlib.suppress(JobNotFound):
        return await read_created(ledger, job_id, config)  # an earlier request created the job
    await broker.quota.check(submitter)
    config = config.dated(moment_of(time.time()))
    remarks = await review(broker, config)
    config = count_epochs(config, remarks.rows)
    wanted = config.model_dump(mode="json")
    numbers = (config.schedule.num_iterations, config.max_staleness)
    outcomes = await inherited_outcomes(ledger, config)
    is_new = await ledger.jobs.create(job_id, wanted, *numbers, submitter, broker.quota.limit, outcomes)
    for note in remarks.notes if is_new else []:
        await ledger.event_log.emit(job_id, "job.warning", note)
    return await read_created(ledger, job_id, asked)  # maybe by a request to another broker


@router.post("/jobs:validate", responses=documented(400, 413), openapi_extra=AS_TOML)
async def validate_job(config: JobConfig, broker: Broker) -> Validation:
    """Check a job as `POST /v1/jobs` does, without creating it. The answer is 200 if it would be accepted."""
    config = config.dated(moment_of(time.time()))
    remarks = await review(broker, config)
    count_epochs(config, remarks.rows)
    return Validation(notes=remarks.notes, rows=remarks.rows)


def submitter_of(request: Request) -> str:
    """Return the id of the API key that the request came with; ANYBODY without one."""
    key: ApiKey | None = request.scope.get(CALLER)
    return key.id if key else ANYBODY


def choose_job_id(idempotency_key: str | None, submitter: str) -> str:
    """Derive the id from the key, so that two brokers at once cannot create two jobs for it. Each submitter has keys of
    their own."""
    if idempotency_key is None:
        return f"job-{secrets.token_hex(6)}"
    text = idempotency_key if submitter == ANYBODY else f"{submitter}\n{idempotency_key}"
    return f"job-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


async def read_created(ledger: Ledger, job_id: str, wanted: JobConfig) -> JobRecord:
    """Return the job that this request or one with its key created. Raises JobNotFound; 409 if it is another job."""
    stored = (await ledger.jobs.fields(job_id))["config"]
    try:
        is_same = JobConfig.model_validate_json(stored, context=IS_ACCEPTED).continues(wanted)
    except ValidationError:  # it is of another version of Onbeat
        is_same = False
    if not is_same:
        raise HTTPException(
            409, f"this Idempotency-Key was used for another job ({job_id}); take a new key for a new job"
        )
    return await read_job(ledger, job_id)


@router.get("/jobs", response_model=JobList)
async def list_jobs(
    broker: Broker, state: JobState | None = None, limit: Annotated[int, Query(ge=1, le=MAX_LISTED_JOBS)] = 200
) -> Response:
    """List jobs, newest first; jobs of a final state come in the order in which they ended, latest first."""
    records: dict[str, JobRecord] = {}  # a job that is created meanwhile moves others to the next part
    first = 0
    while len(records) < limit and (job_ids := await broker.ledger.lists.newest(state, first, JOBS_AT_ONCE)):
        part = await existing_jobs(broker.ledger, job_ids)
        records |= {job_id: job_record(fields) for job_id, fields in part.items() if state in (None, fields["state"])}
        first += JOBS_AT_ONCE
    jobs = list(records.values())[:limit]
    await place_in_queue(broker.ledger, jobs)
    text = JobList(jobs=jobs).model_dump_json()  # through dicts, as in FastAPI, a long list takes much longer
    return Response(text, media_type="application/json")


@router.get("/jobs/{job_id}", responses=documented(404))
async def get_job(job_id: JobId, broker: Broker) -> JobRecord:
    """Return the job's record: its state, configuration and progress."""
    return await read_job(broker.ledger, job_id)


@router.delete("/jobs/{job_id}", status_code=204, responses=documented(404, 409))
async def delete_job(job_id: JobId, broker: Broker) -> None:
    """Delete a job that is over, with its record, metrics, groups, events and audit log.

    Checkpoints are files on the trainer's disk and are kept. Repeating the request changes nothing.
    """
    await broker.ledger.jobs.delete(job_id)


async def read_job(ledger: Ledger, job_id: str) -> JobRecord:
    """Return the job's record, with its place in the queue. Raises JobNotFound."""
    record = job_record(await ledger.jobs.fields(job_id))
    await place_in_queue(ledger, [record])
    return record


# ---- move --------------------------------------------------------------------------------------------------------


@router.post("/jobs/{job_id}:cancel", responses=documented(404, 409))
async def cancel_job(job_id: JobId, broker: Broker) -> JobRecord:
    """Cancel a job: a pending one at once, a running one as soon as its trainer stops. Repeating it changes nothing."""
    for _ in range(MAX_TRIES):  # the trainer may claim the job between our look and our move
        state = await broker.ledger.jobs.state(job_id)
        if state in (JobState.CANCELLING, JobState.CANCELLED):
            break
        wanted = JobState.CANCELLED if state is JobState.PENDING else JobState.CANCELLING
        try:
            await broker.ledger.jobs.move(job_id, wanted)
            break
        except IllegalTransition as conflict:
            if conflict.current == state:
                raise
    return job_record(await broker.ledger.jobs.fields(job_id))


@router.post("/jobs/{job_id}:pause", responses=documented(404, 409))
async def pause_job(job_id: JobId, broker: Broker) -> JobRecord:
    """Pause a job: no prompts are handed out and no iterations are opened until it is resumed.

    Groups that are being generated are finished and kept. Repeating the request changes nothing.
    """
    return await move_once(broker.ledger, job_id, JobState.PAUSED)


@router.post("/jobs/{job_id}:resume", responses=documented(400, 404, 409))
async def resume_job(job_id: JobId, broker: Broker, wanted: Resumption | None = None) -> JobRecord:
    """Resume a job.

    A paused job continues. A job that FAILED or was CANCELLED waits for a trainer again and continues from its newest
    checkpoint and the groups recorded since. A job that SUCCEEDED needs more iterations (`num_iterations`) to do so.
    Repeating the request changes nothing.
    """
    num_iterations = wanted.num_iterations if wanted is not None else None
    fields = await broker.ledger.jobs.fields(job_id)
    state = JobState(fields["state"])
    going_on = (JobState.PENDING,) if num_iterations is None else (JobState.PENDING, JobState.RUNNING)
    if state in going_on and "queued_at" in fields and num_iterations in (None, int(fields["num_iterations"])):
        return await read_job(broker.ledger, job_id)  # it was resumed before
    if state.is_final or num_iterations is not None:
        await broker.quota.check(fields.get("submitter", ANYBODY))  # it fills the queue of that key
        await resume_over(broker.ledger, broker.admission, job_id, num_iterations, broker.quota.limit)
        return await read_job(broker.ledger, job_id)
    if state is JobState.PENDING:  # it also becomes RUNNING, but only by its trainer
        raise IllegalTransition(job_id, state, JobState.RUNNING)
    return await move_once(broker.ledger, job_id, JobState.RUNNING)


async def move_once(ledger: Ledger, job_id: str, wanted: JobState) -> JobRecord:
    """Move the job, unless it is in the wanted state already. Raises IllegalTransition, JobNotFound."""
    try:
        await ledger.jobs.move(job_id, wanted)
    except IllegalTransition as conflict:
        if conflict.current != wanted:
            raise
    return job_record(await ledger.jobs.fields(job_id))


# ---- what happens in a job ---------------------------------------------------------------------------------------


@router.get("/jobs/{job_id}/iterations", responses=documented(404))
async def list_iterations(
    job_id: JobId,
    broker: Broker,
    after: Annotated[int, Query(ge=-1)] = -1,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED_ITERATIONS)] = MAX_LISTED_ITERATIONS,
) -> IterationList:
    """List the iterations after number `after`, in order. The last one may still be open."""
    return IterationList(iterations=await read_iterations(broker.ledger, job_id, after, limit))


@router.get("/jobs/{job_id}/evaluations", responses=documented(404))
async def list_evaluations(job_id: JobId, broker: Broker, after: Annotated[int, Query(ge=-1)] = -1) -> EvaluationList:
    """List the evaluations after number `after`, in order. The last ones may still be open."""
    return EvaluationList(evaluations=await read_evaluations(broker.ledger, job_id, after))


@router.get("/jobs/{job_id}/weights", responses=documented(404))
async def list_weights(
    job_id: JobId,
    broker: Broker,
    after: Annotated[int, Query(ge=-1)] = -1,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED_ITERATIONS)] = MAX_LISTED_ITERATIONS,
) -> WeightsList:
    """List how each published policy version after `after` reached the rollouts, in order."""
    return WeightsList(weights=await read_weights(broker.ledger, job_id, after, limit))


@router.get("/jobs/{job_id}/audit", responses=documented(404))
async def audit_job(
    job_id: JobId, broker: Broker, head: Annotated[str, Query(pattern=r"^([0-9a-f]{40})?$")] = ""
) -> AuditReport:
    """Compare the job's whole audit log with the ledger and with every group that is still kept.

    With the `head` of an earlier report, also check that the log still contains it.
    """
    return await run_audit(broker.ledger, job_id, head)


@router.get("/jobs/{job_id}/metrics", responses=documented(404))
async def get_metrics(job_id: JobId, broker: Broker, after: Annotated[int, Query(ge=-1)] = -1) -> MetricSeries:
    """Return the curves after number `after`: name -> [[number, value], ...]. The number is that of the iteration (at
    most 10,000 of them), and for `eval/...` that of the evaluation."""
    records = await read_iterations(broker.ledger, job_id, after, limit=MAX_LISTED_ITERATIONS)
    evaluations = await read_evaluations(broker.ledger, job_id, after)
    return MetricSeries(metrics=metric_series(records) | evaluation_series(evaluations))


@router.get("/jobs/{job_id}/events", responses=documented(404))
async def list_events(job_id: JobId, broker: Broker, after: Annotated[str, Query(pattern=CURSOR)] = "0") -> EventList:
    """List the events after the cursor (the id of the last one seen), oldest first. The stream has those to come."""
    await broker.ledger.jobs.state(job_id)  # raises JobNotFound
    return EventList(events=await broker.ledger.event_log.read(job_id, after))


@router.get("/workers", tags=["workers"])
async def list_workers(
    broker: Broker, pool: Annotated[str, Query(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")] = "default"
) -> WorkerList:
    """List the rollouts of a pool by their last heartbeats."""
    return WorkerList(workers=await broker.ledger.workers.records(pool))
