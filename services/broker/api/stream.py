"""REST of a job as it runs: server-sent events."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from services.broker.api.context import Broker
from services.broker.api.jobs import JobId
from services.broker.api.problems import documented
from services.broker.live import TooManyWatchers

router = APIRouter(prefix="/v1", tags=["jobs"], responses=documented(422, 503))

CURSOR = r"^\d{1,16}(-\d{1,16})?$"
OK: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Messages `job`, `iteration`, `event`, `explain` and at last `end`, with JSON as their data",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


class EventStream(StreamingResponse):
    """A stream that forgets a client who leaves in the middle at once, and not when memory is tidied up."""

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
    """The job as it runs, as server-sent events: first what is so, then what changes.

    `Last-Event-ID`, or else `after`, is the id of the last event that was seen: those after it are told, and the
    iterations that they are about. Without either the job is told from its beginning, as far as events are kept.
    """
    try:
        await broker.streams.check(job_id)
    except TooManyWatchers as error:
        raise HTTPException(503, str(error), {"Retry-After": "5"}) from error
    return EventStream(broker.streams.stream(job_id, last_event_id or after))
