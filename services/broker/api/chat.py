"""Chats with a policy while it trains, in the form of OpenAI's chat completions: their fields, answers and errors."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints
from redis.exceptions import RedisError, ResponseError
from starlette.types import Receive, Scope, Send

from onbeat.errors import JobNotFound
from onbeat.streams.chat import ChatMessage, ChatRequest, Done, Piece
from services.broker.api.context import Broker
from services.broker.api.problems import MAX_REDIS_TEXT, documented, replace_surrogates
from services.broker.api.stream import EventStream
from services.broker.chats import RETRY_AFTER_S, ChatFailed, Conversation, TrainedModel

logger = logging.getLogger(__name__)

VERSION_HEADER = "Onbeat-Policy-Version"
CLIENT_LEFT = 499  # the client is gone, but logs and metrics show it
SEEDS = 2**31
MAX_REASONS = 5  # reasons that a refusal lists

Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]
T = TypeVar("T")


def as_whole(value: object) -> object:
    """Convert a float such as 5.0 to an int: to JSON it is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Count = Annotated[int, Field(ge=1), BeforeValidator(as_whole)]
FewChoices = Annotated[int, Field(ge=1, le=8), BeforeValidator(as_whole)]
Seed = Annotated[int, Field(ge=0, lt=SEEDS), BeforeValidator(as_whole)]


# ---- what is asked -----------------------------------------------------------------------------------------------


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "user", "assistant"]
    content: str | list[TextPart]

    def as_text(self) -> ChatMessage:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return ChatMessage(role=self.role, content="".join(parts))


class StreamOptions(Strict):
    include_usage: bool = Field(False, description="at last a chunk without choices that has the usage")


class CompletionRequest(Strict):
    """All fields that there are; others are refused."""

    model: str = Field(max_length=200, description="id of a running job, or its name if no other one has it")
    messages: list[Message] = Field(min_length=1, max_length=1000)
    temperature: float | None = Field(None, ge=0, le=2, description="0: the likeliest token; default 1")
    top_p: float | None = Field(None, gt=0, le=1, description="default 1")
    max_tokens: Count | None = Field(None, description="default: rollout.max_response_tokens of the job")
    max_completion_tokens: Count | None = Field(None, description="the newer name of max_tokens")
    stream: bool | None = Field(None, description="server-sent events, text as it is generated")
    stream_options: StreamOptions | None = None
    n: FewChoices | None = Field(None, description="how many answers; default 1")
    seed: Seed | None = Field(None, description="of the first answer; default: another one each time")
    stop: Text | Annotated[list[Text], Field(max_length=4)] | None = Field(None, description="the text ends before it")
    user: str | None = Field(None, description="ignored")

    def to_rollout(self) -> ChatRequest:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return ChatRequest(
            id=f"chatcmpl-{secrets.token_hex(12)}",
            messages=[message.as_text() for message in self.messages],
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbelow(SEEDS) if self.seed is None else self.seed,
            stop=tuple(stop),
            num_choices=self.n or 1,
            is_streaming=bool(self.stream),
        )


# ---- what is answered --------------------------------------------------------------------------------------------


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str = Field(description="JOB@VERSION: the policy version that generated all of it")
    choices: list[Choice]
    usage: Usage


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetails


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "onbeat"
    name: str = Field(description="of the job")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def describe(error: ChatFailed) -> ErrorBody:
    kind = "server_error" if error.status >= 500 else "rate_limit_error" if error.status == 429 else ""
    message = replace_surrogates(str(error))
    details = ErrorDetails(message=message, type=kind or "invalid_request_error", param=error.param, code=error.code)
    return ErrorBody(error=details)


def refuse(error: ChatFailed) -> JSONResponse:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
    return JSONResponse(describe(error).model_dump(), error.status, headers=headers)


def explain_fields(error: RequestValidationError) -> ChatFailed:
    """Return an error that names the first fields that are wrong, and what may be done."""
    found = error.errors()
    if any(details["type"] == "json_invalid" for details in found):
        reason = str(found[0].get("ctx", {}).get("error", "syntax error"))
        return ChatFailed(400, "invalid_json", f"the body is not valid JSON: {reason}")
    paths = [".".join(map(str, details["loc"][1:]))[:100] for details in found[:MAX_REASONS]]
    reasons = [
        f"{path} is not supported here, leave it out"
        if details["type"] == "extra_forbidden"
        else f"{path or 'the body'}: {details['msg']}"
        for path, details in zip(paths, found, strict=False)
    ]
    param = replace_surrogates(paths[0]) or None
    code = "unsupported_parameter" if found[0]["type"] == "extra_forbidden" else "invalid_value"
    return ChatFailed(400, code, "; ".join(reasons), param)


class OpenAIRoute(APIRoute):
    """A route with errors as clients of OpenAI expect them; those of the gate in front are problems, as everywhere."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except ChatFailed as error:
                return refuse(error)
            except RequestValidationError as error:
                return refuse(explain_fields(error))
            except JobNotFound as error:  # deleted just now
                return refuse(ChatFailed(404, "model_not_found", str(error), "model"))
            except RedisError as error:
                return refuse(redis_failed(error))

        return answer


def redis_failed(error: RedisError) -> ChatFailed:
    logger.error("Redis failed a chat: %s: %s", type(error).__name__, error)
    if isinstance(error, ResponseError):
        return ChatFailed(503, "redis_failed", f"Redis refused a command: {str(error)[:MAX_REDIS_TEXT]}")
    return ChatFailed(503, "redis_failed", "Redis does not answer; ask again in a moment")


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
        "headers": {VERSION_HEADER: {"description": "of all answers", "schema": {"type": "integer"}}},
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
}


# The gate's refusal stands for all of them, because FastAPI else adds a 422 that this route never gives.
BEFORE: dict[int | str, dict[str, Any]] = {"4XX": documented(400)[400] | {"description": "Refused before it was read"}}


# ---- routes ------------------------------------------------------------------------------------------------------


@router.get("/models", responses=documented(503))
async def list_models(broker: Broker) -> ModelList:
    """The policies that one can talk to: those of running and paused jobs."""
    models = await broker.chats.models()
    return ModelList(data=[ModelCard(id=m.job_id, created=int(m.created_at), name=m.name) for m in models])


@chat.post(
    "/chat/completions",
    response_model=Completion,
    responses=OK | both_kinds(400, 404, 429, 500, 503, 504) | BEFORE,
)
async def create_completion(body: CompletionRequest, request: Request, broker: Broker) -> Response:
    """Ask the policy as it is now. All answers of a request are of one policy version."""
    model = await broker.chats.find(body.model)
    request.path_params["job_id"] = model.job_id  # for the access log
    conversation = await broker.chats.open(model, body.to_rollout())
    async with AsyncExitStack() as stack:
        stack.push_async_callback(conversation.close)
        if body.stream:
            first = await unless_left(request, conversation.next())
            if isinstance(first, Piece):
                chunks = Chunks(conversation, model, first.policy_version, body.stream_options)
                stack.pop_all()
                return ChunkStream(conversation, chunks.encode(first), first.policy_version)
        else:
            completion = await unless_left(request, collect(conversation, model))
            if completion is not None:
                version = completion.system_fingerprint.rpartition("@")[2]
                return JSONResponse(completion.model_dump(), headers={VERSION_HEADER: version})
    return Response(status_code=CLIENT_LEFT)


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result, or None when the client hung up before: the work is cancelled then."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(until_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait({working, leaving})


async def until_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def collect(conversation: Conversation, model: TrainedModel) -> Completion:
    """Return all answers, once they are complete."""
    texts: dict[int, str] = {}
    reasons: dict[int, Literal["stop", "length"]] = {}
    versions: set[int] = set()
    while isinstance(reply := await conversation.next(), Piece):
        versions.add(reply.policy_version)
        texts[reply.index] = texts.get(reply.index, "") + reply.text
        if reply.finish_reason is not None:
            reasons[reply.index] = reply.finish_reason
    assert len(versions) == 1, f"an answer of the versions {versions}"
    choices = [
        Choice(index=index, message=AnswerMessage(content=texts[index]), finish_reason=reasons[index])
        for index in sorted(texts)
    ]
    return Completion(
        id=conversation.id,
        created=int(time.time()),
        model=model.job_id,
        system_fingerprint=f"{model.job_id}@{versions.pop()}",
        choices=choices,
        usage=usage_of(reply),
    )


def usage_of(done: Done) -> Usage:
    total = done.prompt_tokens + done.completion_tokens
    return Usage(prompt_tokens=done.prompt_tokens, completion_tokens=done.completion_tokens, total_tokens=total)


# ---- streaming ---------------------------------------------------------------------------------------------------


class Chunks:
    """The answers as server-sent events: `data: {...}`, at last `data: [DONE]`, or an error and no more."""

    def __init__(
        self, conversation: Conversation, model: TrainedModel, version: int, options: StreamOptions | None
    ) -> None:
        self._conversation = conversation
        self._has_usage = options is not None and options.include_usage
        self._frame: dict[str, Any] = {
            "id": conversation.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model.job_id,
            "system_fingerprint": f"{model.job_id}@{version}",
        }
        self._begun: set[int] = set()

    async def encode(self, first: Piece) -> AsyncGenerator[bytes]:
        reply: Piece | Done = first
        try:
            while isinstance(reply, Piece):
                yield self._event([self._choice(reply)], None)
                reply = await self._conversation.next()
        except ChatFailed as error:
            yield event(describe(error).model_dump())
            return
        except RedisError as error:
            yield event(describe(redis_failed(error)).model_dump())
            return
        if self._has_usage:
            yield self._event([], usage_of(reply).model_dump())
        yield b"data: [DONE]\n\n"

    def _choice(self, piece: Piece) -> dict[str, Any]:
        role = {} if piece.index in self._begun else {"role": "assistant"}
        self._begun.add(piece.index)
        delta = role | {"content": piece.text}
        return {"index": piece.index, "delta": delta, "finish_reason": piece.finish_reason}

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None) -> bytes:
        return event(self._frame | {"choices": choices} | ({"usage": usage} if self._has_usage else {}))


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


class ChunkStream(EventStream):
    """A stream that closes the conversation itself: when the client hangs up, the generator's waits are cancelled."""

    def __init__(self, conversation: Conversation, messages: AsyncGenerator[bytes], version: int) -> None:
        super().__init__(messages)
        self.headers[VERSION_HEADER] = str(version)
        self._conversation = conversation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._conversation.close()


router.include_router(chat)
