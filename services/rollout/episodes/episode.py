"""One episode on the side of the policy: it answers calls, and records what was sampled. The server gives it a URL.

open --> a call: prompt -> engine -> recorded, answered
  |        |
  |        +--> refused: nothing is recorded, the episode goes on
  |        +--> the client hung up: the generation is cancelled, nothing is recorded
  |        +--> the engine broke: `broken` has its error, and the group's attempt ends
  +--> over: calls in flight are cancelled, further calls are refused
"""

import asyncio
import hashlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onbeat.contracts.completions import ChatFailed
from onbeat.contracts.records import EpisodeWait
from onbeat.contracts.seeds import seed_of
from onbeat.engines import GeneratedResponse, Sampling
from onbeat.environments import Message
from onbeat.streams.codec import PromptTask
from services.rollout.episodes.bodies import ChatBody, ChatMessage, GenerateBody, check_options, to_template
from services.rollout.episodes.recorder import Call
from services.rollout.episodes.rendering import Conversations, Prompt, Renderer
from services.rollout.episodes.toolcalls import ToolCall
from services.rollout.prompts import MAX_CHARS_PER_TOKEN, PromptEncoder
from services.rollout.sampling import sampling_of

SAME_TRIES = 2  # tries with the same seeds; further ones draw other answers
SHORT_WAIT_S = 0.5  # an environment that answers sooner keeps its episode's place in the engine
MAX_NAMES, MAX_NAME = 3, 64  # tools that are named, and characters of a name

# It asks the engine for one response, on the policy version that the group is pinned to.
Generate = Callable[[list[int], Sampling], Awaitable[GeneratedResponse]]


@dataclass(frozen=True)
class GroupContext:
    """The part that all episodes of a group share."""

    task: PromptTask
    messages: Sequence[Message]  # messages of the task
    generate: Generate
    encoder: PromptEncoder
    renderer: Renderer
    broken: "asyncio.Future[BaseException]"  # an error that no call of the environment can cure
    calls: Counter[str] = field(default_factory=Counter)  # `asked` of the engine, and `answered` or refused by it


@dataclass(frozen=True)
class AnsweredCall:
    call: Call
    message: dict[str, Any]  # message in OpenAI's form


class Episode:
    """One try of one episode of a group. `number`: that of the try, from 1.

    The second try repeats the answers of the first, so that an environment that failed by chance changes nothing of the
    training. When both fail, the answers may be the reason, so further tries draw others.
    """

    def __init__(self, group: GroupContext, index: int, number: int = 1) -> None:
        self.index = index
        self._place = (group.task.seed, index) if number <= SAME_TRIES else (group.task.seed, index, f"try {number}")
        self.refusal = ""  # why the session has refused its last call
        self._group = group
        self._conversations = Conversations(group.renderer, group.messages)
        self._calls: list[Call] = []
        self._num_begun = 0  # calls, the cancelled ones included
        self._in_flight: set[asyncio.Task[GeneratedResponse]] = set()
        self._tools_called: list[str] = []  # tools that the last answer called, as far as there are such tools
        self._is_over = False
        self._began_at: float | None = None  # None: the environment is being loaded
        self._waits_since = time.monotonic()

    @property
    def calls(self) -> list[Call]:
        """The calls that were answered, in the order in which they began."""
        return sorted(self._calls, key=lambda call: call.number)

    @property
    def waited_s(self) -> float:
        """Seconds for which the environment has had the word; 0 while a call is in flight, and at the end."""
        return 0.0 if self._is_over or self._in_flight else time.monotonic() - self._waits_since

    @property
    def holds_place(self) -> bool:
        """True if it has a place in the engine, or is about to take one: not while its environment takes longer, nor at
        the end. An environment that is still being loaded is about to call."""
        return not self._is_over and (self._began_at is None or self.waited_s < SHORT_WAIT_S)

    def begin(self) -> None:
        """Give the word to the environment."""
        self._began_at = self._waits_since = time.monotonic()

    def wait(self, environment: str, timeout_s: float) -> EpisodeWait:
        """Describe its wait for its environment, which has this name and this time limit."""
        awaited = f"environment {environment} "
        if self._tools_called:
            names = (f"`{name[:MAX_NAME]}`" for name in self._tools_called[:MAX_NAMES])
            awaited = f"tool{'s' * (len(self._tools_called) > 1)} {', '.join(names)}"
        elif self._began_at is None:
            awaited += "(being loaded)"
        else:
            awaited += f"(after call {len(self._calls)})" if self._calls else "(before its first call)"
        left_s = None if self._began_at is None else max(0.0, self._began_at + timeout_s - time.monotonic())
        group_id = self._group.task.group_id
        return EpisodeWait(
            group_id=group_id, episode=self.index, waits_for=awaited, waited_s=self.waited_s, left_s=left_s
        )

    def end(self) -> None:
        """Refuse further calls, and cancel those in flight."""
        self._is_over = True
        for generating in self._in_flight:
            generating.cancel()

    async def close(self) -> None:
        """End, and wait until nothing of the episode is in the engine."""
        self.end()
        if self._in_flight:
            await asyncio.wait(self._in_flight)

    async def chat(self, body: ChatBody) -> AnsweredCall:
        """Answer a conversation. Raises ChatFailed."""
        self._check_options(body.model_extra)
        wanted = self._wanted(max_tokens=body.max_tokens, max_completion_tokens=body.max_completion_tokens)
        self._check_turns()
        messages = [to_template(message) for message in body.messages]
        tools = [tool.model_dump(mode="json", exclude_unset=True) for tool in body.tools or ()]
        self._check_length(len(json.dumps([messages, tools], ensure_ascii=False)))
        try:
            prompt = self._conversations.prompt(messages, tools)
            new = [message.model_dump(exclude_unset=True) for message in body.messages[prompt.num_known :]]
            new_json = json.dumps(new)
        except ValueError as error:
            raise ChatFailed(400, "invalid_messages", str(error), "messages") from error
        call = await self._call(prompt, wanted, new_json)
        renderer, generated = self._group.renderer, call.generated
        content, tool_calls = renderer.parse_calls(generated, self._group.task.stop) if tools else (generated.text, [])
        message = to_message(call.call_id, content, tool_calls)
        offered = {tool.function.name for tool in body.tools or ()}
        self._tools_called = [tool_call.name for tool_call in tool_calls if tool_call.name in offered]
        self._conversations.add(call, messages, tools, to_template(ChatMessage.model_validate(message)))
        return AnsweredCall(call, message)

    async def complete(self, body: GenerateBody) -> Call:
        """Continue token ids. Raises ChatFailed."""
        self._check_options(body.model_extra)
        self._check_options(body.sampling_params.model_extra)
        wanted = self._wanted(**{"sampling_params.max_tokens": body.sampling_params.max_tokens})
        self._check_turns()
        num_known = len(self._group.encoder.tokenizer)
        if wrong := next((token_id for token_id in body.token_ids if not 0 <= token_id < num_known), None):
            message = f"token_ids: {wrong} is none of the model's {num_known} tokens"
            raise ChatFailed(400, "invalid_request", message, "token_ids")
        call = await self._call(Prompt(body.token_ids, None, 0), wanted, "[]")
        self._tools_called = []
        return call

    # ---- one call ------------------------------------------------------------------------------------------------

    async def _call(self, prompt: Prompt, wanted: int, messages_json: str) -> Call:
        max_tokens = self._fitting(len(prompt.token_ids), wanted)
        number, started, waited_s = self._num_begun, time.monotonic(), self.waited_s
        self._num_begun += 1
        generated = await self._generate(prompt.token_ids, max_tokens, number)
        call = Call(
            number=number,
            call_id=f"chatcmpl-{self._group.task.group_id}-{self.index}-{number}",
            prompt_token_ids=prompt.token_ids,
            generated=generated,
            token_lengths=self._group.encoder.token_lengths(generated.token_ids, generated.text),
            extends=prompt.extends,
            messages_json=messages_json,
            waited_s=waited_s,
            generate_s=time.monotonic() - started,
        )
        self._calls.append(call)
        return call

    async def _generate(self, prompt_token_ids: list[int], max_tokens: int, number: int) -> GeneratedResponse:
        """Return what the engine sampled. Raises ChatFailed; when this is cancelled, the engine's work is, too."""
        group = self._group
        sampling = sampling_of(group.task, group.encoder, seed_of(*self._place, number), max_tokens)
        generating = asyncio.ensure_future(group.generate(prompt_token_ids, sampling))
        group.calls["asked"] += 1
        self._in_flight.add(generating)
        try:
            await asyncio.wait({generating})
        finally:  # this may have been cancelled
            generating.cancel()
            await asyncio.wait({generating})
            self._in_flight.discard(generating)
            self._waits_since = time.monotonic()
        if generating.cancelled() or self._is_over:
            raise is_over()
        group.calls["answered"] += 1
        if (error := generating.exception()) is None:
            return generating.result()
        if isinstance(error, ValueError):
            raise ChatFailed(400, "refused_by_engine", f"the engine refuses the request: {error}") from error
        if not group.broken.done():
            group.broken.set_result(error)
        message = f"the engine failed: {type(error).__name__}: {error}; the episode is given up"
        raise ChatFailed(500, "engine_failed", message) from error

    # ---- limits --------------------------------------------------------------------------------------------------

    def _check_options(self, options: dict[str, Any] | None) -> None:
        check_options(options, self._group.task, self._group.encoder.tokenizer.eos_token_id)

    def _check_turns(self) -> None:
        if self._is_over:
            raise is_over()
        max_turns = self._group.task.environment.max_turns
        if len(self._calls) + len(self._in_flight) >= max_turns:
            message = f"all {max_turns} calls of this episode are used (environment.max_turns)"
            raise ChatFailed(400, "no_turns_left", message)

    def _wanted(self, **fields: int | None) -> int:
        limit = self._group.task.max_response_tokens
        for name, value in fields.items():
            if value is not None and value > limit:
                message = f"{name}: {value} is more than the job's {limit} (rollout.max_response_tokens)"
                raise ChatFailed(400, "invalid_request", f"{message}; lower it or leave it out", name)
        return min((value for value in fields.values() if value is not None), default=limit)

    def _check_length(self, num_characters: int) -> None:
        limit = self._group.encoder.max_context_tokens
        if limit is not None and num_characters > limit * MAX_CHARS_PER_TOKEN:
            raise too_long(f"messages and tools have {num_characters} characters", limit)

    def _fitting(self, num_prompt: int, wanted: int) -> int:
        """Return how many tokens the answer may have: fewer than wanted where the context ends before."""
        limit = self._group.encoder.max_context_tokens
        if not num_prompt:
            raise ChatFailed(400, "invalid_messages", "the messages have no tokens", "messages")
        if limit is None:
            return wanted
        if num_prompt >= limit:
            raise too_long(f"the messages have {num_prompt} tokens", limit)
        return min(wanted, limit - num_prompt)


def is_over() -> ChatFailed:
    return ChatFailed(401, "episode_over", "this episode has ended: its key is no longer valid")


def too_long(length: str, limit: int) -> ChatFailed:
    message = f"{length}, the context has {limit} tokens; shorten the conversation or end the episode"
    return ChatFailed(400, "context_length_exceeded", message, "messages")


def to_message(call_id: str, content: str, tool_calls: Sequence[ToolCall]) -> dict[str, Any]:
    """Return the answer of a call in OpenAI's form."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    for index, call in enumerate(tool_calls):
        function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
        called = {"id": tool_call_id(call_id, index), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(called)
    return message


def tool_call_id(call_id: str, index: int) -> str:
    """Return an id of nine letters and digits, as some chat templates require; the same in every run, because
    templates may show it to the model."""
    return hashlib.sha256(f"{call_id}/{index}".encode()).hexdigest()[:9]
