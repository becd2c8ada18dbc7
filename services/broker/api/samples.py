"""REST of what a policy says: samples by iteration and reward, and one group token by token."""

import asyncio
import json
import math
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from onbeat.contracts.records import GroupDetail, Sample
from onbeat.streams.inspection import group_advantages
from services.broker.api.context import Broker
from services.broker.api.jobs import JobId
from services.broker.api.problems import documented
from services.broker.samples import Choice
from services.broker.views.groups import detail_json, read_group, why_chosen
from services.broker.views.records import read_evaluation_samples, read_samples

router = APIRouter(prefix="/v1", tags=["jobs"], responses=documented(422, 503))

MAX_OFFSET = 10_000_000
MAX_TEXT = 1000  # characters to look for

GroupId = Annotated[str, Path(max_length=40, pattern=r"^(eval-)?[0-9]{1,9}-[0-9]{1,9}$")]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]


class SampleList(BaseModel):
    samples: list[Sample]


@router.get("/jobs/{job_id}/samples", responses=documented(404, 410))
async def list_samples(
    job_id: JobId,
    broker: Broker,
    iteration: Annotated[int | None, Query(ge=0)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 16,
    offset: Annotated[int, Query(ge=0, le=MAX_OFFSET)] = 0,
    min_reward: Reward = None,
    max_reward: Reward = None,
    is_truncated: bool | None = None,
    is_solved: bool | None = None,
    text: Annotated[str, Query(max_length=MAX_TEXT)] = "",
    source: Annotated[str, Query(max_length=MAX_TEXT)] = "",
) -> SampleList:
    """List responses of an iteration (default: the newest that has any), first one of each prompt, then a second one.

    Only responses with rewards from `min_reward` to `max_reward` are listed; the first `offset` of them are skipped.
    `is_truncated`: only those that were cut at the limit of tokens, or only the others. `is_solved`: only those whose
    reward reaches `solved_at` of the job, or only the wrong ones. `text`: only those that hold it, in any case of
    letters, in the prompt or the response. `source`: only those to prompts of this source, in a job of several.
    The answer is 410 if the groups of the iteration are no longer kept (`retention` of the job).
    """
    least, most = -math.inf if min_reward is None else min_reward, math.inf if max_reward is None else max_reward
    if least > most:
        raise HTTPException(422, f"no reward is from {min_reward:g} to {max_reward:g}: min_reward is above max_reward")
    if source:
        check_source(job_id, json.loads((await broker.ledger.jobs.fields(job_id))["config"]), source)
    choice = Choice(least, most, is_truncated, is_solved, text=text, source=source)
    return SampleList(samples=await read_samples(broker.ledger, job_id, iteration, limit, offset, choice))


def check_source(job_id: str, config: dict[str, Any], source: str) -> None:
    """Refuse a source that the job has not."""
    names = [section["name"] for section in config["data"]] if isinstance(config["data"], list) else []
    if source not in names:
        there = f"they are: {', '.join(names)}" if names else "it has a single one, which has no name"
        raise HTTPException(422, f"{job_id} has no source {source!r} of prompts; {there}")


@router.get("/jobs/{job_id}/evaluations/{evaluation}/samples", responses=documented(404))
async def list_evaluation_samples(job_id: JobId, broker: Broker, evaluation: Annotated[int, Path(ge=0)]) -> SampleList:
    """List some responses of an evaluation. The list is empty until the evaluation is done."""
    await broker.ledger.jobs.state(job_id)  # raises JobNotFound
    return SampleList(samples=await read_evaluation_samples(broker.ledger, job_id, evaluation))


@router.get("/jobs/{job_id}/groups/{group_id}", response_model=GroupDetail, responses=documented(404, 410))
async def get_group(job_id: JobId, group_id: GroupId, broker: Broker) -> Response:
    """Return a group: its prompt, and all responses with the engine's data about every token.

    `tokens` has one list per response. In a group of more than 100,000 tokens, the lists of the last responses are
    empty. Groups of evaluations are not kept. The answer is 410 if the group is no longer kept (`retention` of the
    job).
    """
    payload = await read_group(broker.ledger, job_id, group_id)
    advantages = await group_advantages(broker.ledger, job_id, int(group_id.partition("-")[0]), group_id)
    chosen = await why_chosen(broker.ledger, job_id, group_id)
    body = await asyncio.to_thread(detail_json, payload, advantages, chosen)
    return Response(body, media_type="application/json")
