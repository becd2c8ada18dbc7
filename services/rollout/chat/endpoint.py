"""`python -m services.rollout.chat.endpoint ORDER.json`: models of local folders behind OpenAI's interface, on this
machine alone, without a broker, Redis and a trainer. It ends with SIGTERM.

    POST /v1/chat/completions    as the broker's, with the prompts of the job that wrote the checkpoint
    GET  /v1/models              the names of the models
    GET  /readyz                 all engines serve

There is an engine for each model, and the engines start one after another. Chats wait for a free slot of theirs.
"""

import asyncio
import json
import logging
import secrets
import socket
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from onbeat.config import JobConfig
from onbeat.config.templates import TemplateArguments
from onbeat.contracts.completions import VERSION_HEADER, ChatFailed, CompletionRequest, wrong_fields
from onbeat.contracts.endpoint import EndpointOrder, ServedModel
from onbeat.contracts.section import IS_ACCEPTED
from onbeat.engines import Engine
from onbeat.machine.cores import run_on_cores
from onbeat.process.hangup import unless_left
from onbeat.process.logging import configure
from onbeat.process.settings import read_settings
from onbeat.process.temporary import private_folder
from onbeat.streams.chat import Reply
from services.rollout.chat.server import ChatAnswer, ChatRules, Speaker, explain
from services.rollout.end_of_turn import add_end_of_turn
from services.rollout.engines.failure import describe_cause
from services.rollout.engines.registry import (
    check_engine,
    create_engine,
    find_hardware,
    prepare_engine,
    stop_engine,
    wait_for_engine,
)
from services.rollout.episodes.server import LOOPBACK, read_body
from services.rollout.prompts import PromptEncoder
from services.rollout.settings import Settings

logger = logging.getLogger(__name__)

MAX_TOKENS = 512  # longest answer of a model whose job is not known, unless the request names another
NUM_SLOTS = 4  # answers that are generated at a time
MODEL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.safetensors"]


@dataclass(frozen=True)
class Served:
    """A model whose engine serves it."""

    model: ServedModel
    speaker: Speaker


class Pinned:
    """The gate of an engine whose policy version does not change."""

    def __init__(self, version: int) -> None:
        self._version = version

    @asynccontextmanager
    async def visit(self) -> AsyncIterator[int]:
        yield self._version


# ---- HTTP --------------------------------------------------------------------------------------------------------


def create_app(served: Sequence[Served], instance_id: str) -> Starlette:
    by_name = {one.model.name: one for one in served}
    created = int(time.time())

    async def complete(request: Request) -> Response:
        try:
            body = CompletionRequest.model_validate_json(await read_body(request))
            if body.model not in by_name:
                names = ", ".join(by_name)
                raise ChatFailed(404, "model_not_found", f"no model {body.model!r} here; there is {names}", "model")
        except ValidationError as error:
            return to_error(wrong_fields(error.errors()))
        except ChatFailed as refusal:
            return to_error(refusal)
        return await answer(request, body, by_name[body.model])

    async def list_models(request: Request) -> Response:
        cards = [{"id": name, "object": "model", "created": created, "owned_by": "onbeat"} for name in by_name]
        return JSONResponse({"object": "list", "data": cards})

    async def tell_ready(request: Request) -> Response:
        return PlainTextResponse(instance_id)

    return Starlette(
        routes=[
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/v1/models", list_models, methods=["GET"]),
            Route("/readyz", tell_ready, methods=["GET"]),
        ],
        # A page whose host name leads to this machine reads no answers.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=[LOOPBACK, "localhost"])],
    )


async def answer(request: Request, body: CompletionRequest, served: Served) -> Response:
    """Answer whole or in chunks. The generation is cancelled when the client hangs up."""
    replies = speak(body, served)
    reply = await unless_left(request.receive, anext(replies))
    if reply is None:
        return Response(status_code=499)  # it reaches no client
    headers = {VERSION_HEADER: str(served.model.policy_version)}
    if reply.status == 200 and body.stream:
        return StreamingResponse(events(reply, replies), headers=headers, media_type="text/event-stream")
    await replies.aclose()
    return Response(reply.body, reply.status, headers, "application/json")


async def speak(body: CompletionRequest, served: Served) -> AsyncGenerator[Reply]:
    """Yield the parts of the answer; the last may be an error. Closing this ends the generation."""
    replies: asyncio.Queue[Reply] = asyncio.Queue()

    async def say(reply: Reply) -> bool:
        replies.put_nowait(reply)
        return True

    def settle(speaking: asyncio.Task[None]) -> None:
        error = None if speaking.cancelled() else speaking.exception()
        if error is not None:
            failure = explain(error, "onbeat chat")
            if failure.status == 500:
                logger.error("a chat failed", exc_info=error)
            replies.put_nowait(Reply.of_error(failure))

    chat = ChatAnswer(f"chatcmpl-{secrets.token_hex(12)}", served.model.name, body, say)
    speaking = asyncio.create_task(served.speaker.speak(chat))
    speaking.add_done_callback(settle)
    try:
        while True:
            reply = await replies.get()
            yield reply
            if reply.is_last:
                return
    finally:
        speaking.cancel()
        await asyncio.wait({speaking})


async def events(reply: Reply, replies: AsyncGenerator[Reply]) -> AsyncGenerator[str]:
    """Yield server-sent events: chunks, then `[DONE]`, or an error and no more."""
    try:
        while not reply.is_last:
            yield f"data: {reply.body}\n\n"
            reply = await anext(replies)
        if reply.body:
            yield f"data: {reply.body}\n\n"
        if reply.status == 200:
            yield "data: [DONE]\n\n"
    finally:
        await replies.aclose()


def to_error(error: ChatFailed) -> Response:
    reply = Reply.of_error(error)
    return Response(reply.body, reply.status, media_type="application/json")


# ---- engines -----------------------------------------------------------------------------------------------------


async def serve(order: EndpointOrder, settings: Settings) -> None:
    """Start the engines, then serve until SIGTERM. Raises ValueError for what is not here, and what engines raise."""
    if settings.cpu_cores:
        run_on_cores(settings.cpu_cores)
    device = check_engine(settings.engine, settings.device, settings.tensor_parallel_size)
    place = {
        "device": device,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "cpu_cores": settings.cpu_cores or None,
    }
    prepare_engine(settings.engine, **place)
    job = None if order.job is None else JobConfig.model_validate(order.job, context=IS_ACCEPTED)
    dtype = job.model.dtype if job is not None else "auto"
    if dtype == "auto":
        dtype = "bfloat16" if find_hardware(device).bfloat16 == "native" else "float32"
    create = partial(
        create_engine,
        settings.engine,
        max_model_len=job.model.max_context_tokens if job is not None else None,
        max_num_seqs=NUM_SLOTS,
        dtype=dtype,
        gpu_memory_utilization=settings.gpu_memory_utilization / len(order.models),
        kv_cache_gib=settings.kv_cache_gib,
        **place,
    )
    async with AsyncExitStack() as cleanup:
        listener = cleanup.enter_context(hold_port(order.port))
        served = await start_engines(order, job, create, settings.engine_start_s, cleanup)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # so can a next server, soon after this one
        app = create_app(served, order.instance_id)
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
        await uvicorn.Server(config).serve(sockets=[listener])


def hold_port(port: int) -> socket.socket:
    """Return a socket that is bound to the port, so that no other process gets it while engines start. Raises OSError.

    One with `SO_REUSEADDR` does not keep others away before it listens. It is for a port on which connections of an
    earlier server are still closing.
    """
    listener = socket.socket()
    try:
        listener.bind((LOOPBACK, port))
    except OSError:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            listener.close()
            raise
    return listener


async def start_engines(
    order: EndpointOrder,
    job: JobConfig | None,
    create: partial[Engine],
    start_s: float,
    cleanup: AsyncExitStack,
) -> list[Served]:
    """Start an engine on each model within `start_s`. `cleanup` stops them. Raises EngineBroken and what engines
    raise."""
    folders = [await asyncio.to_thread(find_folder, model.source) for model in order.models]
    data = job.rendering if job is not None else TemplateArguments()
    max_context_tokens = job.model.max_context_tokens if job is not None else None
    encoder = await asyncio.to_thread(PromptEncoder.load, folders[0], max_context_tokens, data)
    if added := add_end_of_turn(encoder, data, folders[0]):
        logger.info("%s", added)
    rules = ChatRules.of(job) if job is not None else ChatRules(MAX_TOKENS)
    served = []
    for model, folder in zip(order.models, folders, strict=True):
        engine = create()
        cleanup.push_async_exit(partial(stop_engine, engine))
        # vLLM's engine writes beside the folder that it gets.
        link = cleanup.enter_context(private_folder("onbeat-chat-")) / "model"
        link.symlink_to(folder, target_is_directory=True)
        starting = asyncio.create_task(engine.start(link, model.policy_version))
        await wait_for_engine(starting, start_s, "the start of the engine", "ONBEAT_ENGINE_START_S")
        starting.result()
        served.append(Served(model, Speaker(engine, Pinned(model.policy_version), encoder, NUM_SLOTS, rules)))
    return served


def find_folder(source: str) -> Path:
    """Return the folder of a model; one of the hub is downloaded unless it is there. Raises ValueError."""
    folder = Path(source)
    if folder.is_dir():
        return folder.resolve()
    if folder.is_absolute():
        raise ValueError(f"the model {source} is not there any more")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=MODEL_FILES))
    except (OSError, ValueError) as error:  # huggingface_hub's errors are of these kinds
        raise ValueError(f"the model {source} cannot be got from the hub: {error}") from error


def main() -> int:
    """Serve the order. An error is the last line of the log."""
    settings = read_settings(Settings, "chat")
    configure(settings.log_format)
    order = EndpointOrder.model_validate(json.loads(Path(sys.argv[1]).read_text("utf-8")))
    try:
        asyncio.run(serve(order, settings))
    except Exception as error:  # engines and their libraries raise many kinds
        logger.error("the engine did not start, or broke", exc_info=error)
        logger.error("%s", describe_cause(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
