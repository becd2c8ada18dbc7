"""REST of the timeline of a job."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response

from onbeat.advice import NUM_RECENT, advice_for
from onbeat.streams.records import read_iterations
from onbeat.types import IterationState, Timeline
from services.broker.api.context import Broker
from services.broker.api.jobs import JobId, read_job
from services.broker.api.problems import documented

router = APIRouter(prefix="/v1", tags=["jobs"], responses=documented(422, 503))


@router.get("/jobs/{job_id}/timeline", response_model=Timeline, responses=documented(404))
async def get_timeline(job_id: JobId, broker: Broker, iterations: Annotated[int, Query(ge=1, le=20)] = 5) -> Response:
    """Return what the trainer and each rollout did during the last iterations, and how long they were idle.

    A group appears once it is accepted, the trainer's work once the iteration is committed.
    """
    timeline = await broker.timelines.read(job_id, iterations)
    job = await read_job(broker.ledger, job_id)
    first = max(0, job.next_iteration - NUM_RECENT - 1)  # the first one of what it is given is left out
    records = await read_iterations(broker.ledger, job_id, first - 1, NUM_RECENT + 1)
    committed = [each for each in records if each.state is IterationState.COMMITTED]
    timeline.advice = advice_for(committed, job.num_training_devices, job.config.get("schedule", {}).get("mode"))
    # There may be tens of thousands of spans, and others wait for this thread.
    return Response(await asyncio.to_thread(timeline.model_dump_json), media_type="application/json")
