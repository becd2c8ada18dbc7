"""REST of the timeline of a job."""

from typing import Annotated

from fastapi import APIRouter, Query

from onbeat.types import Timeline
from services.broker.api.context import Broker
from services.broker.api.jobs import JobId
from services.broker.api.problems import documented

router = APIRouter(prefix="/v1", tags=["jobs"], responses=documented(422, 503))


@router.get("/jobs/{job_id}/timeline", responses=documented(404))
async def get_timeline(job_id: JobId, broker: Broker, iterations: Annotated[int, Query(ge=1, le=20)] = 5) -> Timeline:
    """What the trainer and each rollout did during the last iterations, and how much of the time they were idle.

    Groups show when they are accepted, the trainer's work when the iteration is committed.
    """
    return await broker.timelines.read(job_id, iterations)
