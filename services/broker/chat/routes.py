"""Chats with a policy while it trains, in the form of OpenAI's chat completions: routes and errors."""

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field
from redis.exceptions import RedisError
from starlette.types import Receive, Scope, Send

from onbeat.contracts.completions import (
    VERSION_HEADER,
    ChatFailed,
    Completion,
    CompletionRequest,
    ErrorBody,
    wrong_fields,
)
from onbeat.contracts.errors import JobNotFound
from onbeat.process.hangup import unless_left
from onbeat.streams.chat import Reply
from services.broker.api.problems import CLIENT_LEFT, documented, explain_redis
from services.broker.api.stream import EventStream
from services.broker.chat.desk import ChatDesk

RETRY_AFTER_S = 5


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "onbeat"
    name: str = Field(description="name of the job")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


# ---- errors ------------------------------------------------------------------------------------------------------


class OpenAIRoute(APIRoute):
    """A route with errors as clients of OpenAI expect them; those of the gate in front are problems, as everywhere."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except (ChatFailed, JobNotFound, RedisError, RequestValidationError) as error:
                return respond(to_reply(error))

        return answer


def to_reply(error: Exception) -> Reply:
    """Convert an error of a chat to the reply that the client gets."""
    if isinstance(error, RequestValidationError):
        error = wrong_fields([{**details, "loc": details["loc"][1:]} for details in error.errors()])
    elif isinstance(error, RedisError):
        error = ChatFailed(503, "redis_failed", ": ".join(explain_redis(error)))
    elif not isinstance(error, ChatFailed):  # the job was deleted just now
        error = ChatFailed(404, "model_not_found", str(error), "model")
    return Reply.of_error(error)


def respond(reply: Reply) -> Response:
    """Return the whole answer, or an error."""
    headers = {VERSION_HEADER: str(reply.policy_version)} if reply.status == 200 else {}
    if reply.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    return Response(reply.body, reply.status, headers, "application/json")


def both_kinds(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route for OpenAPI: its own errors, and the gate's, which come before them."""
    responses = documented(*statuses)
    for response in responses.values():
        response["model"] = ErrorBody
    return responses


router = APIRouter(prefix="/v1", tags=["chat"])
chat = APIRouter(route_class=OpenAIRoute)

OK: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answers; with `stream`, chunks of them as server-sent events",
        "headers": {VERSION_HEADER: {"description": "policy version of the answers", "schema": {"type": "integer"}}},
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


# 4XX stands for refusals before the route runs, such as a missing key. Without it, FastAPI would document a 422, which
# this route never answers.
BEFORE: dict[int | str, dict[str, Any]] = {
    "4XX": documented(400)[400] | {"description": "Request refused before its body was read"}
}


# ---- routes ------------------------------------------------------------------------------------------------------


def desk_of(request: Request) -> ChatDesk:
    return cast(ChatDesk, request.app.state.chats)


Desk = Annotated[ChatDesk, Depends(desk_of)]


@router.get("/models", responses=documented(503))
async def list_models(desk: Desk) -> ModelList:
    """List the policies that answer chats: those of running and paused jobs."""
    jobs = await desk.models()
    return ModelList(data=[ModelCard(id=job.id, created=int(job.created_at), name=job.name) for job in jobs])


@chat.post(
    "/chat/completions", response_model=Completion, responses=OK | both_kinds(400, 404, 429, 500, 503, 504) | BEFORE
)
async def create_completion(body: CompletionRequest, request: Request, desk: Desk) -> Response:
    """Ask the policy as it is now. All answers of a request are of one policy version."""
    job = await desk.find(body.model)
    request.path_params["job_id"] = job.id  # the access log needs it
    async with AsyncExitStack() as stack:
        replies = await stack.enter_async_context(desk.converse(job.id, body))
        first = await unless_left(request.receive, anext(replies))
        if first is None:
            return Response(status_code=CLIENT_LEFT)
        if first.status != 200 or not body.stream:
            return respond(first)
        return ChunkStream(first, replies, stack.pop_all())


class ChunkStream(EventStream):
    """The answer as server-sent events: `data: {...}`, at last `data: [DONE]`, or an error and no more. `cleanup` is
    run in the end, not inside of the generator: its waits are cancelled when the client hangs up."""

    def __init__(self, first: Reply, replies: AsyncGenerator[Reply], cleanup: AsyncExitStack) -> None:
        super().__init__(self._encode(first))
        self.headers[VERSION_HEADER] = str(first.policy_version)
        self._replies, self._cleanup = replies, cleanup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._cleanup:
            await super().__call__(scope, receive, send)

    async def _encode(self, reply: Reply) -> AsyncGenerator[bytes]:
        while not reply.is_last:
            yield event(reply.body)
            try:
                reply = await anext(self._replies)
            except (ChatFailed, JobNotFound, RedisError) as error:
                reply = to_reply(error)
        if reply.body:
            yield event(reply.body)
        if reply.status == 200:
            yield event("[DONE]")


def event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


router.include_router(chat)
