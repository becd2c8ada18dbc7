"""REST of what a policy says: samples by iteration and reward, one group token by token, the same prompt elsewhere."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from onbeat.errors import GroupsTrimmed
from onbeat.streams.inspection import group_advantages
from onbeat.types import GroupDetail, GroupSummary, Sample
from services.broker.alike import StillReading
from services.broker.api.context import Broker
from services.broker.api.jobs import JobId
from services.broker.api.problems import documented
from services.broker.groups import GroupNotFound, detail_json, read_alike, read_group
from services.broker.records import RewardRange, read_evaluation_samples, read_samples

router = APIRouter(prefix="/v1", tags=["jobs"], responses=documented(422, 503))

MAX_OFFSET = 10_000_000

GroupId = Annotated[str, Path(max_length=40, pattern=r"^(eval-)?[0-9]{1,9}-[0-9]{1,9}$")]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


class SampleList(BaseModel):
    samples: list[Sample]


class GroupList(BaseModel):
    groups: list[GroupSummary]


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what is not there, or not yet, into an HTTP error."""
    try:
        yield
    except GroupNotFound as error:
        raise HTTPException(404, str(error)) from error
    except GroupsTrimmed as error:
        raise HTTPException(410, str(error)) from error
    except StillReading as error:
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from error


@router.get("/jobs/{job_id}/samples", responses=documented(404, 410))
async def list_samples(
    job_id: JobId,
    broker: Broker,
    iteration: Annotated[int | None, Query(ge=0)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 16,
    offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    min_reward: Reward = None,
    max_reward: Reward = None,
) -> SampleList:
    """Responses to read, of the newest iteration that has any, with rewards from `min_reward` to `max_reward`: a first
    one of each prompt, then a second one of each. `offset`: so many are left out first.

    410: the iteration is so old that they are no longer kept (`retention` of the job)."""
    rewards = RewardRange(
        -math.inf if min_reward is None else min_reward, math.inf if max_reward is None else max_reward
    )
    if rewards.least > rewards.most:
        raise HTTPException(422, f"no reward is from {min_reward:g} to {max_reward:g}: min_reward is above max_reward")
    with refusals():
        samples = await read_samples(broker.ledger, job_id, iteration, limit, offset, rewards)
    return SampleList(samples=samples)


@router.get("/jobs/{job_id}/evaluations/{evaluation}/samples", responses=documented(404))
async def list_evaluation_samples(job_id: JobId, broker: Broker, evaluation: Annotated[int, Path(ge=0)]) -> SampleList:
    """A few responses of an evaluation that is done; none of any other."""
    await broker.ledger.jobs.state(job_id)  # raises JobNotFound
    return SampleList(samples=await read_evaluation_samples(broker.ledger, job_id, evaluation))


@router.get("/jobs/{job_id}/groups/{group_id}", response_model=GroupDetail, responses=documented(404, 410))
async def get_group(job_id: JobId, group_id: GroupId, broker: Broker) -> Response:
    """A prompt with all its responses, and what the engine said of every token. `tokens` has a list for each response;
    of a group of more than 100,000 tokens those of the last responses are empty. Groups of evaluations are not kept.

    410: its iteration is so old that it is no longer kept (`retention` of the job)."""
    with refusals():
        payload = await read_group(broker.ledger, job_id, group_id)
    advantages = await group_advantages(broker.ledger, job_id, int(group_id.partition("-")[0]), group_id)
    body = await asyncio.to_thread(detail_json, payload, advantages)
    return Response(body, media_type="application/json")


@router.get("/jobs/{job_id}/groups/{group_id}/alike", responses=documented(404, 410))
async def list_alike(job_id: JobId, group_id: GroupId, broker: Broker) -> GroupList:
    """The kept groups of all iterations that have this one's prompt, itself included, in order: the newest 1000 of the
    job's newest 20,000 groups. Of `eval-NUMBER-INDEX`: the same held-out prompt in each evaluation that is done, whose
    number is then `iteration`, by the responses that are kept.

    503: the groups are still being read; ask again."""
    with refusals():
        return GroupList(groups=await read_alike(broker.ledger, broker.alike, job_id, group_id))
