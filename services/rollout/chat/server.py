"""The server of chats: it answers with the served policy version, beside the groups of training, never in their way.

taken --> inside the gate: pieces of text, of one version --> done
  |             |
  |             +--> another version is to be loaded: begun again on that, unless text was shown already
  +--> refused; the client has gone; this rollout leaves the job
"""

import asyncio
import functools
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from redis.exceptions import RedisError

from onbeat.config import JobConfig
from onbeat.contracts.completions import SEEDS, AnswerMessage, ChatFailed, Choice, Completion, CompletionRequest, Usage
from onbeat.contracts.errors import WeightsError
from onbeat.engines import ChatSampling, Engine, FinishReason, StreamingEngine, TextPiece, VersionMismatch
from onbeat.streams.best_effort import best_effort
from onbeat.streams.chat import Chats, Reply
from onbeat.streams.codec import Message, PromptTask
from services.rollout import meters
from services.rollout.claim_loop import Assignment
from services.rollout.engines.stops import StopFilter
from services.rollout.gate import PolicyMoved, VersionGate
from services.rollout.prompts import MAX_CHARS_PER_TOKEN, GroupFailed, PromptEncoder
from services.rollout.sampling import ended

logger = logging.getLogger(__name__)

POLL_S = 1.0  # the end of the job is noticed this late
ALIVE_S = 1.0  # a client that has hung up is noticed this late
RETRY_S = 5.0  # pause after an error of Redis
FAREWELL_DEADLINE_S = 2.0
MAX_STARTS = 5  # tries of a chat whose versions pass too quickly

Say = Callable[[Reply], Awaitable[bool]]


def create_chat_server(
    job: Assignment, engine: Engine, gate: VersionGate, encoder: PromptEncoder, ending: asyncio.Event
) -> "ChatServer | None":
    """Create the server of a job's chats; None where the settings allow no chats."""
    if not (num_slots := job.settings.chat_slots):
        return None
    speaker = Speaker(engine, gate, encoder, num_slots, ChatRules.of(job.config))
    return ChatServer(Chats(job.ledger.redis, job.job_id), job.settings.worker_id, speaker, num_slots, ending)


class ChatServer:
    """A server of a job's chats. `num_slots`: chats at a time. `ending`: once it is set, no more chats are taken."""

    def __init__(self, chats: Chats, worker_id: str, speaker: "Speaker", num_slots: int, ending: asyncio.Event) -> None:
        self._chats, self._worker_id, self._speaker = chats, worker_id, speaker
        self._slots = asyncio.Semaphore(num_slots)
        self._ending = ending

    async def serve(self) -> None:
        """Serve until `ending` is set and all chats that were taken are answered. An error ends its own chat only."""
        async with asyncio.TaskGroup() as tasks:
            while not self._ending.is_set():
                await self._slots.acquire()
                taken = await self._take()
                if taken is None:
                    self._slots.release()
                else:
                    chat_id, request = taken
                    answering = tasks.create_task(self._answer(chat_id, request))
                    answering.add_done_callback(lambda _: self._slots.release())

    async def _take(self) -> tuple[str, CompletionRequest] | None:
        try:
            return await self._chats.take(POLL_S)
        except RedisError as error:
            logger.warning("no chats are taken for %.0f s: %s", RETRY_S, error)
            await asyncio.sleep(RETRY_S)
            return None

    async def _answer(self, chat_id: str, request: CompletionRequest) -> None:
        """Answer a chat while the answer is wanted."""
        say = functools.partial(self._chats.say, chat_id)
        answer = ChatAnswer(chat_id, self._chats.job_id, request, say)
        speaking = asyncio.create_task(self._speaker.speak(answer), name=f"chat {chat_id}")
        try:
            while not speaking.done() and await say(Reply()):
                await asyncio.wait({speaking}, timeout=ALIVE_S)
        except RedisError as error:
            logger.warning("chat %s is given up: %s", chat_id, error)
        finally:  # this may have been cancelled: the rollout leaves the job
            speaking.cancel()
            await asyncio.wait({speaking})
            meters.CHATS.labels(outcome=await self._settle(speaking, say)).inc()

    async def _settle(self, speaking: asyncio.Task[None], say: Say) -> str:
        """Report to the client what went wrong, if anything did. Return the outcome."""
        error = None if speaking.cancelled() else speaking.exception()
        if error is None and not speaking.cancelled():
            return "done"
        failure = explain(error, self._worker_id)
        if failure.status == 500:
            logger.error("%s failed", speaking.get_name(), exc_info=error)
        with best_effort(f"{speaking.get_name()}: its end could not be reported"):
            async with asyncio.timeout(FAREWELL_DEADLINE_S):
                return failure.code if await say(Reply.of_error(failure)) else "cancelled"
        return "cancelled"


class ChatAnswer:
    """The answer to one chat in OpenAI's form: sent in chunks when the request streams, else when it is complete."""

    def __init__(self, chat_id: str, job_id: str, request: CompletionRequest, say: Say) -> None:
        self.request, self._say = request, say
        self._has_usage = request.stream_options is not None and request.stream_options.include_usage
        self._frame: dict[str, Any] = {"id": chat_id, "created": int(time.time()), "model": job_id}
        self.is_shown = False
        self.begin(0)

    def begin(self, version: int) -> None:
        """Begin, or begin again, with another version. Nothing is kept of what was not shown."""
        self.version = version
        self._frame["system_fingerprint"] = f"{self._frame['model']}@{version}"
        self._texts: dict[int, str] = {}
        self._reasons: dict[int, FinishReason] = {}

    async def show(self, index: int, text: str, finish_reason: FinishReason | None) -> None:
        """Add text to a choice; the reason comes with its last."""
        delta = {"content": text} if index in self._texts else {"role": "assistant", "content": text}
        self._texts[index] = self._texts.get(index, "") + text
        if finish_reason is not None:
            self._reasons[index] = finish_reason
        if self.request.stream:
            self.is_shown = True
            await self._send(self._chunk([{"index": index, "delta": delta, "finish_reason": finish_reason}]))

    async def finish(self, num_prompt_tokens: int, num_tokens: int) -> None:
        total = num_prompt_tokens + num_tokens
        usage = Usage(prompt_tokens=num_prompt_tokens, completion_tokens=num_tokens, total_tokens=total)
        self.is_shown = True  # this may be cancelled after the answer is sent
        if not self.request.stream:
            choices = [
                Choice(index=index, message=AnswerMessage(content=text), finish_reason=self._reasons[index])
                for index, text in sorted(self._texts.items())
            ]
            completion = Completion(**self._frame, choices=choices, usage=usage)
            await self._send(completion.model_dump_json(), is_last=True)
        else:
            await self._send(self._chunk([], usage.model_dump()) if self._has_usage else "", is_last=True)

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> str:
        chunk = self._frame | {"object": "chat.completion.chunk", "choices": choices}
        return json.dumps(chunk | ({"usage": usage} if self._has_usage else {}))

    async def _send(self, body: str, *, is_last: bool = False) -> None:
        await self._say(Reply(policy_version=self.version, body=body, is_last=is_last))


@dataclass(frozen=True)
class ChatRules:
    """The rules by which a conversation becomes a prompt: those by which the job made its own."""

    max_tokens: int  # longest answer to a request that names none
    system_prompt: str | None = None  # system message of conversations that have none
    is_plain: bool = False  # prompts are texts that the policy continues, without a chat template

    @classmethod
    def of(cls, config: JobConfig) -> "ChatRules":
        is_plain = not getattr(config.rendering, "as_chat", True)
        return cls(config.rollout.max_response_tokens, config.rendering.system_prompt, is_plain)

    def to_task(self, request: CompletionRequest) -> PromptTask:
        messages = [Message(role=message.role, content=message.text) for message in request.messages]
        if self.is_plain:
            return PromptTask(text="".join(message.content for message in messages), max_response_tokens=0)
        if self.system_prompt is not None and all(message.role != "system" for message in messages):
            messages.insert(0, Message(role="system", content=self.system_prompt))
        return PromptTask(messages=messages, max_response_tokens=0)


class Gate(Protocol):
    """The part of a version gate that chats use."""

    def visit(self) -> AbstractAsyncContextManager[int]:
        """Yield the version that is served until this context ends."""


class Speaker:
    """The generation of answers. `num_slots`: responses of chats in the engine at a time."""

    def __init__(self, engine: Engine, gate: Gate, encoder: PromptEncoder, num_slots: int, rules: ChatRules) -> None:
        self._engine, self._gate, self._encoder = engine, gate, encoder
        self._responses = asyncio.Semaphore(num_slots)
        self._rules = rules

    async def speak(self, answer: ChatAnswer) -> None:
        """Generate all choices, again if the policy moves before text is shown. Raises ChatFailed, what the gate raises
        and what engines raise."""
        request = answer.request
        prompt_token_ids = self._encode(request)
        sampling = ChatSampling(
            max_response_tokens=self._room(request.wanted_tokens, len(prompt_token_ids)),
            temperature=1.0 if request.temperature is None else request.temperature,
            seed=secrets.randbelow(SEEDS) if request.seed is None else request.seed,
            top_p=1.0 if request.top_p is None else request.top_p,
            stop_token_ids=self._encoder.turn_end_ids,
        )
        for start in range(1, MAX_STARTS + 1):
            try:
                async with self._gate.visit() as version:
                    answer.begin(version)
                    return await self._generate(answer, prompt_token_ids, sampling)
            except PolicyMoved:
                if answer.is_shown or start == MAX_STARTS:
                    raise

    def _encode(self, request: CompletionRequest) -> list[int]:
        limit = self._encoder.max_context_tokens
        num_chars = sum(len(message.text) for message in request.messages)
        if limit is not None and num_chars > limit * MAX_CHARS_PER_TOKEN:
            raise too_long(f"the messages have {num_chars} characters", limit)
        try:
            return self._encoder.encode(self._rules.to_task(request))
        except GroupFailed as failure:
            if failure.kind == "prompt_too_long" and limit is not None:
                raise too_long("the messages have more tokens than that", limit) from failure
            raise ChatFailed(400, "invalid_messages", str(failure), "messages") from failure

    def _room(self, wanted: int | None, num_prompt_tokens: int) -> int:
        """Return the most tokens that each choice may have. Raises ChatFailed when the context is too short."""
        limit = self._encoder.max_context_tokens
        if limit is None:
            return wanted or self._rules.max_tokens
        room = limit - num_prompt_tokens
        num_tokens = wanted or max(1, min(self._rules.max_tokens, room))
        if num_tokens > room:
            raise too_long(f"{num_prompt_tokens} tokens of messages and {num_tokens} of the answer are too many", limit)
        return num_tokens

    async def _generate(self, answer: ChatAnswer, prompt_token_ids: list[int], sampling: ChatSampling) -> None:
        """Generate all choices on the answer's version."""
        samplings = [replace(sampling, seed=sampling.seed + index) for index in range(answer.request.n or 1)]
        try:
            async with asyncio.TaskGroup() as tasks:
                choices = [
                    tasks.create_task(self._generate_choice(answer, index, prompt_token_ids, choice_sampling))
                    for index, choice_sampling in enumerate(samplings)
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        await answer.finish(len(prompt_token_ids), sum(choice.result() for choice in choices))

    async def _generate_choice(
        self, answer: ChatAnswer, index: int, prompt_token_ids: list[int], sampling: ChatSampling
    ) -> int:
        """Return the choice's number of tokens: all that were generated until a stop string was complete."""
        stop = answer.request.stop or []
        stops = StopFilter([stop] if isinstance(stop, str) else stop)
        num_tokens = 0
        stream = stream_text(self._engine, self._encoder, prompt_token_ids, sampling, answer.version)
        async with self._responses, aclosing(stream) as pieces:
            async for piece in pieces:
                num_tokens += piece.num_tokens
                text = stops.push(piece.text)
                finish_reason = "stop" if stops.is_hit else piece.finish_reason
                if finish_reason is not None:
                    await answer.show(index, text + stops.rest(), finish_reason)
                    return num_tokens
                if text:
                    await answer.show(index, text, None)
        raise RuntimeError("the engine ended a response without a reason")


async def stream_text(
    engine: Engine, encoder: PromptEncoder, prompt_token_ids: list[int], sampling: ChatSampling, version: int
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
        (response,) = ended(engine, [response], sampling, encoder)
        if {span.policy_version for span in response.version_spans} - {version}:
            raise VersionMismatch(version, response.version_spans[0].policy_version)
        yield TextPiece(response.text, len(response.token_ids), response.finish_reason)
    except ValueError as error:
        raise ChatFailed(400, "refused_by_engine", f"the engine refuses the request: {error}") from error


def too_long(length: str, limit: int) -> ChatFailed:
    message = f"{length}, the context has {limit} tokens; shorten the messages or lower max_tokens"
    return ChatFailed(400, "context_length_exceeded", message, "messages")


def explain(error: BaseException | None, worker_id: str) -> ChatFailed:
    """Return the error as the client sees it; None means that the chat was cancelled."""
    if isinstance(error, ChatFailed):
        return error
    if error is None:
        return ChatFailed(503, "rollout_left", f"{worker_id} leaves the job; ask again")
    if isinstance(error, PolicyMoved):
        message = (
            f"{error} before this answer was complete, and no answer mixes versions; ask again, for fewer tokens, "
        )
        return ChatFailed(503, "policy_moved", message + "or pause the job")
    if isinstance(error, WeightsError | VersionMismatch | RedisError):
        return ChatFailed(503, "rollout_not_ready", f"{worker_id}: {error}; ask again")
    message = f"the engine of {worker_id} failed: {type(error).__name__}: {error}; its log has more"
    return ChatFailed(500, "engine_failed", message)
