"""The bodies of requests to the session server, checked, and messages in the form that chat templates take.

An unknown field is refused by name: a client that asks for other sampling than the job's must not believe that it gets
it.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
from pydantic_core import from_json

from onbeat.contracts.completions import ChatFailed
from onbeat.environments import Message
from onbeat.streams.codec import PromptTask

# To check an object or a list takes 20 us, in which no other call is answered.
MAX_OBJECTS = 20_000
STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # also one without an end, so that it is looked at once

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]  # an error for each of a million wrong items would take gigabytes


class Open(BaseModel):
    """A body that keeps what it does not know."""

    model_config = ConfigDict(extra="allow", frozen=True)


class TextPart(Open):
    type: Literal["text"]
    text: str


class FunctionCall(Open):
    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCallBody(Open):
    id: str = ""
    function: FunctionCall


class ChatMessage(Open):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCallBody] | None = None
    tool_call_id: str | None = None


class Function(Open):
    name: str


class Tool(Open):
    type: Literal["function"]
    function: Function


class StreamOptions(Open):
    include_usage: bool = False


class ChatBody(Open):
    messages: Items[ChatMessage] = Field(min_length=1)
    tools: Items[Tool] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None


class SamplingParams(Open):
    max_tokens: PositiveInt | None = None
    logprobs: int | None = None


class GenerateBody(Open):
    token_ids: Items[int] = Field(min_length=1)
    sampling_params: SamplingParams = SamplingParams()


# These fields have no effect here, whatever their value.
WITHOUT_EFFECT = {
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id"),
    *("cache_salt", "skip_special_tokens", "spaces_between_special_tokens", "detokenize"),
    "return_token_ids",
}
# These fields are accepted only with these values, which ask for what the server does in any case.
NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
}
NEUTRAL: dict[str, tuple[Any, ...]] = NEUTRAL_SAMPLING | {
    "n": (1,),
    "stream": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "output_mode": ("tokens",),
    "priority": (0,),
}
SAMPLING = {"temperature", "top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "seed", "best_of"}
SAMPLING |= NEUTRAL_SAMPLING.keys()

B = TypeVar("B", ChatBody, GenerateBody)


def parse_body(kind: type[B], content: bytes) -> B:
    """Return the body of a request. Raises ChatFailed, naming a field that is wrong."""
    if num_brackets(content) > MAX_OBJECTS and num_brackets(STRING.sub(b"", content)) > MAX_OBJECTS:
        message = (
            f"the body has more than {MAX_OBJECTS} messages, parts, tools, calls and lists; shorten the conversation"
        )
        raise ChatFailed(413, "body_too_large", message)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        deepest = max(errors, key=lambda details: len(details["loc"]))  # a list of parts is no wrong text
        field = ".".join(map(str, deepest["loc"])) or None
        message = f"{field or 'the body'}: {deepest['msg']}"
        raise ChatFailed(400, "invalid_request", message, field) from error


def num_brackets(content: bytes) -> int:
    return content.count(b"{") + content.count(b"[")


def check_options(options: Mapping[str, Any] | None, task: PromptTask, eos_token_id: int | None) -> None:
    """Check the fields of a body that the server does not use. Raises ChatFailed for a field that asks for other
    sampling than the job's, that the server does not support, or that it does not know."""
    allowed = {**NEUTRAL, **sampling_options(task, eos_token_id)}
    for name, value in (options or {}).items():
        if value is None or name in WITHOUT_EFFECT or value in allowed.get(name, ()):
            continue
        reason = "the session cannot do that"
        if name in SAMPLING:
            reason = "the job's own sampling is used"
            reason += f" (rollout.{name} of the job)" if name in ("stop", "stop_token_ids") else ""
        raise ChatFailed(400, "invalid_request", f"{name}: leave it out; {reason}", name)


def sampling_options(task: PromptTask, eos_token_id: int | None) -> dict[str, tuple[Any, ...]]:
    """Return the values that ask for the sampling of the task."""
    stops, stop_ids = list(task.stop), list(task.stop_token_ids)
    return {
        "temperature": (task.temperature,),
        "top_p": (task.top_p if task.HasField("top_p") else 1,),
        "top_k": (task.top_k,) if task.top_k else (-1, 0),
        "min_p": (task.min_p,),
        "min_tokens": (task.min_tokens,),
        "stop": ([], stops, *(stops if len(stops) == 1 else ())),
        "stop_token_ids": ([], [eos_token_id], stop_ids),
    }


def to_template(message: ChatMessage) -> Message:
    """Return a message as chat templates expect it: the content is text, and arguments of calls are a mapping."""
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    rendered: Message = {"role": role, "content": content}
    rendered |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
    if message.role == "assistant" and message.tool_calls:
        rendered["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function_of(call)} for call in message.tool_calls
        ]
    return rendered


def function_of(call: ToolCallBody) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = from_json(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {"name": call.function.name, "arguments": arguments}
