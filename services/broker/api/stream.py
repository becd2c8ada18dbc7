"""REST of a job as it runs: server-sent events, and the timeline of its last iterations."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from onbeat.contracts.advice import NUM_RECENT, advice_for
from onbeat.contracts.records import Timeline
from onbeat.contracts.sharing import overlap_sentence
from onbeat.contracts.states import IterationState
from onbeat.streams.records import read_iterations
from services.broker.api.context import Broker
from services.broker.api.jobs import CURSOR, JobId, read_job
from services.broker.api.problems import documented

router = APIRouter(prefix="/v1", tags=["jobs"], responses=documented(422, 503))

OK: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Messages `job`, `iteration`, `event`, `explain` and at last `end`, with JSON as their data",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


class EventStream(StreamingResponse):
    """A stream that is closed as soon as its client has left, not when memory is cleaned up."""

    media_type = "text/event-stream"

    def __init__(self, messages: AsyncGenerator[bytes]) -> None:
        super().__init__(messages, headers={"X-Accel-Buffering": "no"})
        self._messages = messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._messages):
            await super().__call__(scope, receive, send)


@router.get("/jobs/{job_id}/stream", response_class=StreamingResponse, responses=OK | documented(404))
async def stream_job(
    job_id: JobId,
    broker: Broker,
    after: Annotated[str, Query(pattern=CURSOR)] = "0",
    last_event_id: Annotated[str | None, Header(pattern=CURSOR)] = None,
) -> EventStream:
    """Follow a job by server-sent events: first its current state, then every change.

    The stream continues after the event with the id `Last-Event-ID` (or else `after`), and repeats the iterations that
    later events are about. Without either, it begins with the oldest event that is kept.
    """
    await broker.streams.check(job_id)
    return EventStream(broker.streams.stream(job_id, last_event_id or after))


@router.get("/jobs/{job_id}/timeline", response_model=Timeline, responses=documented(404))
async def get_timeline(job_id: JobId, broker: Broker, iterations: Annotated[int, Query(ge=1, le=20)] = 5) -> Response:
    """Return what the trainer and each rollout did during the last iterations, and how long they were idle.

    A group appears once it is accepted, the trainer's work once the iteration is committed.
    """
    timeline = await broker.timelines.read(job_id, iterations)
    job = await read_job(broker.ledger, job_id)
    num_read = max(iterations, NUM_RECENT) + 1  # the adviser leaves out the first one
    records = await read_iterations(broker.ledger, job_id, max(0, job.next_iteration - num_read) - 1, num_read)
    committed = [record for record in records if record.state is IterationState.COMMITTED]
    timeline.overlap = overlap_sentence(
        job, [record for record in committed if record.iteration in timeline.iterations]
    )
    timeline.advice = advice_for(committed, job.config.get("schedule", {}).get("mode"))
    # There may be tens of thousands of spans, and others wait for this thread.
    return Response(await asyncio.to_thread(timeline.model_dump_json), media_type="application/json")
