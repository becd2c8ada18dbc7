"""REST of a job as it runs: server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.broker.api.context import Broker
from services.broker.api.jobs import CURSOR, JobId
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
