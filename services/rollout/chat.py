"""The server of chats: it answers with the served policy version, beside the groups of training, never in their way.

taken --> inside the gate: pieces of text, of one version --> done
  |             |
  |             +--> another version is to be loaded: begun again on that, unless text was shown already
  +--> refused; the client has gone; this rollout leaves the job
"""

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from redis.exceptions import RedisError

from onbeat.errors import WeightsError
from onbeat.streams.chat import Alive, ChatRequest, Chats, Done, Failed, Piece
from onbeat.streams.codec import Message, PromptTask
from services.rollout import meters
from services.rollout.engine import (
    ChatSampling,
    Engine,
    FinishReason,
    StreamingEngine,
    TextPiece,
    VersionMismatch,
)
from services.rollout.gate import PolicyMoved, VersionGate
from services.rollout.prompts import GroupFailed, PromptEncoder
from services.rollout.stops import StopFilter

logger = logging.getLogger(__name__)

POLL_S = 1.0  # the end of the job is noticed this late
ALIVE_S = 1.0  # a client that has hung up is noticed this late
RETRY_S = 5.0  # pause after an error of Redis
FAREWELL_DEADLINE_S = 2.0
MAX_STARTS = 5  # tries of a chat whose versions pass too quickly
MAX_CHARS_PER_TOKEN = 32  # a longer text does not fit the context, and is not even tokenised


class ChatFailed(Exception):
    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.reply = Failed(status=status, code=code, message=message, param=param)


class ChatServer:
    """A server of a job's chats. `num_slots`: chats at a time, and responses that they have in the engine.
    `max_tokens`: of a request that names none. `ending`: once it is set, no more chats are taken."""

    def __init__(
        self,
        chats: Chats,
        job_id: str,
        worker_id: str,
        engine: Engine,
        gate: VersionGate,
        encoder: PromptEncoder,
        *,
        num_slots: int,
        max_tokens: int,
        ending: asyncio.Event,
    ) -> None:
        self._chats, self._job_id, self._worker_id = chats, job_id, worker_id
        self._engine, self._gate, self._encoder = engine, gate, encoder
        self._slots = asyncio.Semaphore(num_slots)
        self._responses = asyncio.Semaphore(num_slots)
        self._max_tokens = max_tokens
        self._ending = ending

    async def serve(self) -> None:
        """Serve until `ending` is set and all chats that were taken are answered. An error ends its own chat only."""
        async with asyncio.TaskGroup() as tasks:
            while not self._ending.is_set():
                await self._slots.acquire()
                request = await self._take()
                if request is None:
                    self._slots.release()
                else:
                    answering = tasks.create_task(self._answer(request), name=f"chat {request.id}")
                    answering.add_done_callback(lambda _: self._slots.release())

    async def _take(self) -> ChatRequest | None:
        try:
            return await self._chats.take(self._job_id, POLL_S)
        except RedisError as error:
            logger.warning("no chats are taken for %.0f s: %s", RETRY_S, error)
            await asyncio.sleep(RETRY_S)
            return None

    async def _answer(self, request: ChatRequest) -> None:
        generating = asyncio.create_task(self._generate(request))
        following = asyncio.create_task(self._while_wanted(request))
        try:
            await asyncio.wait({generating, following}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # this may have been cancelled: the rollout leaves the job
            for task in (generating, following):
                task.cancel()
            await asyncio.wait({generating, following})
            await self._settle(request, generating, following)

    async def _while_wanted(self, request: ChatRequest) -> None:
        while True:
            if not await self._chats.say(self._job_id, request.id, Alive(worker_id=self._worker_id)):
                return
            await asyncio.sleep(ALIVE_S)

    async def _settle(
        self, request: ChatRequest, generating: asyncio.Task[None], following: asyncio.Task[None]
    ) -> None:
        """Report to the client what went wrong, if anything did."""
        error = None if generating.cancelled() else generating.exception()
        if not following.cancelled() and (lost := following.exception()) is not None:
            error = error or lost
        outcome = "done"
        if generating.cancelled() or error is not None:
            failure = explain(error, self._worker_id)
            outcome = failure.code
            if failure.status == 500:
                logger.error("chat %s failed", request.id, exc_info=error)
            outcome = "cancelled" if not await self._say_last(request, failure) else failure.code
        meters.CHATS.labels(outcome=outcome).inc()

    async def _say_last(self, request: ChatRequest, failure: Failed) -> bool:
        try:
            async with asyncio.timeout(FAREWELL_DEADLINE_S):
                return await self._chats.say(self._job_id, request.id, failure)
        except (RedisError, TimeoutError) as error:
            logger.warning("chat %s: its end could not be reported: %s", request.id, error)
            return False

    # ---- one chat ------------------------------------------------------------------------------------------------

    async def _generate(self, request: ChatRequest) -> None:
        """Generate all choices, again if the policy moves before text is shown. Raises ChatFailed, PolicyMoved, what
        the gate raises and what engines raise."""
        prompt_token_ids = self._encode(request)
        max_tokens = self._room(request, len(prompt_token_ids))
        for _ in range(MAX_STARTS):
            answer = Answer(self._chats, self._job_id, request)
            try:
                work = functools.partial(self._generate_pinned, answer, prompt_token_ids, max_tokens)
                return await self._gate.visit(work)
            except PolicyMoved as moved:
                if answer.is_shown:
                    raise
                last = moved
        raise ChatFailed(
            503,
            "policy_moved",
            f"{last}, and before that {MAX_STARTS - 1} times before an answer was complete; ask for fewer tokens, "
            "or stream it, or pause the job",
        )

    def _encode(self, request: ChatRequest) -> list[int]:
        limit = self._encoder.max_context_tokens
        num_chars = sum(len(message.content) for message in request.messages)
        if limit is not None and num_chars > limit * MAX_CHARS_PER_TOKEN:
            raise too_long(f"the messages have {num_chars} characters", limit)
        messages = [Message(role=message.role, content=message.content) for message in request.messages]
        try:
            return self._encoder.encode(PromptTask(messages=messages, max_response_tokens=0))
        except GroupFailed as failure:
            if failure.kind == "prompt_too_long" and limit is not None:
                raise too_long("the messages have more tokens than that", limit) from failure
            raise ChatFailed(400, "invalid_messages", str(failure), "messages") from failure

    def _room(self, request: ChatRequest, num_prompt_tokens: int) -> int:
        """Return the most tokens that each choice may have. Raises ChatFailed when the context is too short."""
        limit = self._encoder.max_context_tokens
        room = limit - num_prompt_tokens if limit is not None else self._max_tokens
        if request.max_tokens is None and room > 0:
            return min(self._max_tokens, room)
        wanted = request.max_tokens or 1
        if limit is not None and wanted > room:
            raise too_long(f"{num_prompt_tokens} tokens of messages and {wanted} of the answer are too many", limit)
        return wanted

    async def _generate_pinned(
        self, answer: "Answer", prompt_token_ids: list[int], max_tokens: int, version: int
    ) -> None:
        choose = functools.partial(self._generate_choice, answer, prompt_token_ids, max_tokens, version)
        try:
            async with asyncio.TaskGroup() as tasks:
                choices = [tasks.create_task(choose(index)) for index in range(answer.request.num_choices)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        num_tokens = sum(choice.result() for choice in choices)
        await answer.finish(Done(prompt_tokens=len(prompt_token_ids), completion_tokens=num_tokens))

    async def _generate_choice(
        self, answer: "Answer", prompt_token_ids: list[int], max_tokens: int, version: int, index: int
    ) -> int:
        """Return the choice's number of tokens: all that were generated until a stop string was complete."""
        request = answer.request
        sampling = ChatSampling(max_tokens, request.temperature, request.seed + index, request.top_p)
        stops = StopFilter(request.stop)
        num_tokens, finish_reason = 0, None
        async with self._responses, aclosing(stream_text(self._engine, prompt_token_ids, sampling, version)) as pieces:
            async for piece in pieces:
                num_tokens += piece.num_tokens
                finish_reason = piece.finish_reason
                text = stops.push(piece.text)
                if stops.is_hit:
                    finish_reason = "stop"
                if finish_reason is not None:
                    await answer.show(version, index, text + stops.rest(), finish_reason)
                    break
                if text:
                    await answer.show(version, index, text)
        if finish_reason is None:
            raise RuntimeError("the engine ended a response without a reason")
        return num_tokens


class Answer:
    """The pieces of one try to answer, sent at once when the request streams, else when the answer is complete."""

    def __init__(self, chats: Chats, job_id: str, request: ChatRequest) -> None:
        self._chats, self._job_id = chats, job_id
        self.request = request
        self.is_shown = False
        self._kept: list[Piece] = []

    async def show(self, version: int, index: int, text: str, finish_reason: FinishReason | None = None) -> None:
        piece = Piece(policy_version=version, index=index, text=text, finish_reason=finish_reason)
        if self.request.is_streaming:
            self.is_shown = True
            await self._chats.say(self._job_id, self.request.id, piece)
        else:
            self._kept.append(piece)

    async def finish(self, done: Done) -> None:
        self.is_shown = True  # this may be cancelled after the answer is sent
        await self._chats.say(self._job_id, self.request.id, *self._kept, done)


async def stream_text(
    engine: Engine, prompt_token_ids: list[int], sampling: ChatSampling, version: int
) -> AsyncGenerator[TextPiece]:
    """Yield text from any engine. Raises ChatFailed for what the engine refuses."""
    try:
        if isinstance(engine, StreamingEngine):
            async with aclosing(engine.stream(prompt_token_ids, sampling, version)) as pieces:
                async for piece in pieces:
                    yield piece
            return
        if sampling.top_p < 1:
            raise ValueError("it cannot draw with top_p; leave it out")
        (response,) = await engine.generate(prompt_token_ids, 1, sampling, expected_version=version)
        if {span.policy_version for span in response.version_spans} - {version}:
            raise VersionMismatch(version, response.version_spans[0].policy_version)
        yield TextPiece(response.text, len(response.token_ids), response.finish_reason)
    except ValueError as error:
        raise ChatFailed(400, "refused_by_engine", f"the engine refuses the request: {error}") from error


def too_long(what: str, limit: int) -> ChatFailed:
    message = f"{what}, the context has {limit} tokens; shorten the messages or lower max_tokens"
    return ChatFailed(400, "context_length_exceeded", message, "messages")


def explain(error: BaseException | None, worker_id: str) -> Failed:
    """Return the error as the client sees it; None means that the chat was cancelled."""
    if isinstance(error, ChatFailed):
        return error.reply
    if error is None:
        return Failed(status=503, code="rollout_left", message=f"{worker_id} leaves the job; ask again")
    if isinstance(error, PolicyMoved):
        message = f"{error} before this answer was complete, and no answer mixes versions; ask again"
        return Failed(status=503, code="policy_moved", message=message)
    if isinstance(error, WeightsError | VersionMismatch | RedisError):
        return Failed(status=503, code="rollout_not_ready", message=f"{worker_id}: {error}; ask again")
    message = f"the engine of {worker_id} failed: {type(error).__name__}: {error}; its log has more"
    return Failed(status=500, code="engine_failed", message=message)
