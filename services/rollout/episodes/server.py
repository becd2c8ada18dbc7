"""The HTTP server of a rollout that environments and their agents call: the policy behind OpenAI's interface.

It listens on this machine's loopback interface only. A key is valid for one episode, until that ends.

    POST /v1/chat/completions      messages in, a message out; as one chunk to clients that stream
    POST /inference/v1/generate    token ids in and out, as vLLM has it
    GET  /v1/models                the policy
"""

import asyncio
import contextlib
import functools
import json
import logging
import resource
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

from onbeat.contracts.completions import ChatFailed
from onbeat.engines import EngineBroken, GeneratedResponse
from onbeat.process.hangup import unless_left
from services.rollout import meters
from services.rollout.episodes.bodies import ChatBody, GenerateBody, parse_body
from services.rollout.episodes.contract import EpisodeAccess
from services.rollout.episodes.episode import AnsweredCall, Episode
from services.rollout.episodes.recorder import Call

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as missing:
    raise ImportError(
        f"jobs with an environment need starlette and uvicorn on the rollout, and {missing.name} is not installed; "
        "install the packages of requirements/cpu.lock or requirements/cuda.lock"
    ) from missing

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MODEL = "policy"
MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_DRAINED_BYTES = 16 * MAX_BODY_BYTES  # bytes of a longer body are read, so that the client reads the refusal
BODY_DEADLINE_S = 30.0
KEEP_ALIVE_S = 86_400  # environments may be silent for long between two calls
STOP_DEADLINE_S = 5.0
FIRST_REQUEST_S = 30.0
MAX_SHARE = 0.5  # share of the files of this process that may be connections
BACKLOG = 64  # asyncio tries as many at once, and logs each one that fails

T = TypeVar("T")
Endpoint = Callable[[Request, Episode], Awaitable[Response]]


class Server(uvicorn.Server):
    """A server that leaves signals to the rollout."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Connection(H11Protocol):
    """A connection that any user of this machine may make: there are not too many, and each one asks soon. Where there
    are too many, the oldest one that has asked nothing ends, so that silent ones keep no episode out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.made_at = self.loop.time()
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        kept = [
            other for other in self.connections if isinstance(other, Connection) and not other.transport.is_closing()
        ]
        if 0 < MAX_SHARE * limit < len(kept):  # -1: no limit
            warn_of_limit(limit)
            silent = (connection for connection in kept if connection.cycle is None)
            min(silent, key=lambda connection: connection.made_at).transport.abort()  # perhaps this one
        self._hang_up = self.loop.call_later(FIRST_REQUEST_S, self._end_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        self._hang_up.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self) -> None:
        if self.cycle is None:  # not one request
            self.transport.close()


@functools.cache
def warn_of_limit(limit: int) -> None:
    logger.warning("connections to sessions are ended: this process may open only %d files (`ulimit -n`)", limit)


class SessionServer:
    """The sessions of all episodes that this rollout plays now."""

    def __init__(self) -> None:
        self._episodes: dict[str, Episode] = {}  # episodes by their keys

    async def start(self) -> None:
        """Listen on a free port, until `stop`. Clients may connect from now on."""
        # Named as TCP: asyncio switches off Nagle's algorithm, which costs 40 ms a call, on such sockets only.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind((LOOPBACK, 0))
        listener.listen()
        self._port = listener.getsockname()[1]
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        config = uvicorn.Config(
            self._create_app(),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            http=Connection,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="serve sessions")

    async def stop(self) -> None:
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=STOP_DEADLINE_S)
        self._serving.cancel()

    def open(self, episode: Episode) -> EpisodeAccess:
        """Give an episode a URL and a key. Raises EngineBroken, which has this process replaced, when the server has
        ended by itself."""
        if self._serving.done():
            raise EngineBroken("the HTTP server of sessions has ended by itself")
        key = secrets.token_urlsafe(32)
        self._episodes[key] = episode
        return EpisodeAccess(f"http://{LOOPBACK}:{self._port}/v1", key)

    def close(self, access: EpisodeAccess) -> None:
        """Forget a key, and end its episode. It may be closed already."""
        if (episode := self._episodes.pop(access.key, None)) is not None:
            episode.end()

    def _create_app(self) -> Starlette:
        app = Starlette(
            routes=[
                Route("/v1/chat/completions", self._endpoint(chat), methods=["POST"]),
                Route("/inference/v1/generate", self._endpoint(generate), methods=["POST"]),
                Route("/v1/models", self._endpoint(list_models), methods=["GET"]),
            ],
            exception_handlers={HTTPException: refuse},
        )
        app.router.redirect_slashes = False  # a redirect would keep the connection
        return app

    def _endpoint(self, work: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            outcome, episode = "answered", None
            try:
                episode = self._find(request)
                return await work(request, episode)
            except ChatFailed as refused:
                outcome = refused.code
                if episode is not None:
                    episode.refusal = str(refused)
                return to_response(refused.status, refused.to_body().model_dump())
            except ClientDisconnect:
                outcome = "cancelled"
                return Response(status_code=499)  # it reaches no client
            finally:
                if work is not list_models:
                    meters.EPISODE_CALLS.labels(outcome=outcome).inc()

        return answer

    def _find(self, request: Request) -> Episode:
        """Return the episode whose key the request has. Raises ChatFailed."""
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        episode = self._episodes.get(sent.strip()) if scheme.lower() == "bearer" else None
        if episode is None:
            message = "this key is of no episode, or its episode has ended; send the key of the session, as a bearer"
            raise ChatFailed(401, "invalid_api_key", message)
        return episode


async def chat(request: Request, episode: Episode) -> Response:
    body = parse_body(ChatBody, await read_body(request))
    answer = await answer_of(request, episode.chat(body))
    completion = to_completion(answer, body)
    return to_stream(completion, body) if body.stream else to_response(200, completion)


async def generate(request: Request, episode: Episode) -> Response:
    body = parse_body(GenerateBody, await read_body(request))
    call = await answer_of(request, episode.complete(body))
    generated = call.generated
    choice = {"index": 0, "token_ids": generated.token_ids, "finish_reason": generated.finish_reason}
    choice["logprobs"] = None if body.sampling_params.logprobs is None else to_logprobs(generated)
    content = {"request_id": call.call_id, "choices": [choice], "usage": usage_of(call)}
    return to_response(200, content)


async def answer_of(request: Request, answering: Awaitable[T]) -> T:
    """Return the answer. Raises ClientDisconnect, once it is cancelled, when the client hangs up before."""
    answer = await unless_left(request.receive, answering)
    if answer is None:
        raise ClientDisconnect
    return answer


async def list_models(request: Request, episode: Episode) -> Response:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "onbeat"}
    return to_response(200, {"object": "list", "data": [model]})


# ---- requests --------------------------------------------------------------------------------------------------------


async def read_body(request: Request) -> bytes:
    """Return the body. Raises ChatFailed when it is too long or does not come."""
    parts, num_bytes = [], 0
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > MAX_DRAINED_BYTES:
                    break
                if num_bytes <= MAX_BODY_BYTES:
                    parts.append(part)
    except TimeoutError:
        message = f"the body was not complete after {BODY_DEADLINE_S:.0f} s"
        raise ChatFailed(408, "timeout", message) from None
    if num_bytes > MAX_BODY_BYTES:
        message = f"the body has more than {MAX_BODY_BYTES} bytes; shorten the conversation"
        raise ChatFailed(413, "body_too_large", message)
    return b"".join(parts)


# ---- responses -------------------------------------------------------------------------------------------------------


async def refuse(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method. The key was not checked, so the connection is not kept."""
    assert isinstance(error, HTTPException)
    return Response(error.detail, error.status_code, {**(error.headers or {}), "Connection": "close"})


def to_response(status: int, content: dict[str, Any]) -> Response:
    """Answer in ASCII, so that halves of characters pass. Who has no key keeps no connection."""
    headers = {"Connection": "close"} if status == 401 else None
    return Response(json.dumps(content), status, headers, "application/json")


def to_stream(completion: dict[str, Any], body: ChatBody) -> Response:
    """Return the whole completion as server-sent events: one chunk, the usage if it is asked for, and the end."""
    usage, (choice,) = completion.pop("usage"), completion.pop("choices")
    delta = choice.pop("message")
    if "tool_calls" in delta:
        delta |= {"tool_calls": [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]}
    frame = completion | {"object": "chat.completion.chunk"}
    chunks = [frame | {"choices": [choice | {"delta": delta}]}]
    if body.stream_options is not None and body.stream_options.include_usage:
        chunks.append(frame | {"choices": [], "usage": usage})
    events = "".join(f"data: {data}\n\n" for data in (*map(json.dumps, chunks), "[DONE]"))
    return Response(events, media_type="text/event-stream")


def to_completion(answer: AnsweredCall, body: ChatBody) -> dict[str, Any]:
    call, generated = answer.call, answer.call.generated
    has_called = "tool_calls" in answer.message and generated.finish_reason == "stop"
    choice: dict[str, Any] = {
        "index": 0,
        "message": answer.message,
        "finish_reason": "tool_calls" if has_called else generated.finish_reason,
        "logprobs": to_logprobs(generated) if body.logprobs else None,
    }
    completion: dict[str, Any] = {
        "id": call.call_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": usage_of(call),
    }
    if body.return_token_ids:
        choice["token_ids"] = generated.token_ids
        completion["prompt_token_ids"] = call.prompt_token_ids
    return completion


def to_logprobs(generated: GeneratedResponse) -> dict[str, Any]:
    """Return the log-probabilities of the sampled tokens. Tokens are named by their ids: text is ambiguous."""
    unknown: dict[str, Any] = {"bytes": None, "top_logprobs": []}
    return {
        "content": [
            {"token": f"token_id:{token_id}", "token_id": token_id, "logprob": logprob, **unknown}
            for token_id, logprob in zip(generated.token_ids, generated.rollout_logprobs, strict=True)
        ]
    }


def usage_of(call: Call) -> dict[str, int]:
    num_prompt, num_sampled = len(call.prompt_token_ids), len(call.generated.token_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_sampled, "total_tokens": num_prompt + num_sampled}
