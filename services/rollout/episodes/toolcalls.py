"""Calls of tools in the text of an answer, in the forms of some families of models:

    Hermes, Qwen       <tool_call>                                          as many as there are, amid other text
                       {"name": "search", "arguments": {"query": "onbeat"}}
                       </tool_call>
    Llama 3            {"name": "search", "parameters": {"query": "onbeat"}}            the whole answer is one call
    Mistral 7B, Nemo   [TOOL_CALLS] [{"name": "search", "arguments": {"query": "onbeat"}}]   the whole answer is a list

The text of an answer has no special tokens, as [TOOL_CALLS] is one. What does not hold such JSON, or is not closed,
stays plain text: the policy learns that it calls nothing.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


# It returns the text without the calls in it, and the calls. Text without any is returned as it is.
Parser = Callable[[str], tuple[str, list[ToolCall]]]


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """Read calls of Hermes and Qwen; see Parser."""
    kept, calls, position = [], [], 0
    while (start := text.find(OPEN, position)) >= 0:
        call, end = parse_block(text, start + len(OPEN))
        kept.append(text[position : start if call else end])
        if call is not None:
            calls.append(call)
        position = end
    kept.append(text[position:])
    return ("".join(kept).strip(), calls) if calls else (text, [])


def parse_block(text: str, start: int) -> tuple[ToolCall | None, int]:
    """Return the call behind an opening tag that ends at `start`, and where its block ends; None and `start` when there
    is no valid one."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        value, end = DECODER.raw_decode(text, start)
        call = to_call(value)
    except (ValueError, RecursionError):
        return None, start
    rest = text[end:].lstrip()
    if not rest.startswith(CLOSE):
        return None, start
    return call, len(text) - len(rest) + len(CLOSE)


def parse_llama(text: str) -> tuple[str, list[ToolCall]]:
    """Read the call of Llama 3; see Parser. Its template shows one call at a time, so several are none."""
    return parse_whole(text, "<|python_tag|>", "parameters", lambda value: [value])


def parse_mistral(text: str) -> tuple[str, list[ToolCall]]:
    """Read the calls of Mistral 7B and Nemo; see Parser."""
    return parse_whole(text, "[TOOL_CALLS]", "arguments", lambda value: value if isinstance(value, list) else [])


def parse_whole(text: str, tag: str, name: str, to_list: Callable[[Any], list[Any]]) -> tuple[str, list[ToolCall]]:
    """Read an answer that is nothing but calls, perhaps behind a tag. Each has its arguments under `name`: JSON without
    that is an answer."""
    try:
        values = to_list(DECODER.decode(text.strip().removeprefix(tag).strip()))
        calls = [to_call(value | {"arguments": value[name]}) for value in values]
    except (ValueError, TypeError, KeyError, RecursionError):
        calls = []
    return ("", calls) if calls else (text, [])


FORMS: tuple[Parser, ...] = (parse, parse_llama, parse_mistral)


def to_call(value: Any) -> ToolCall:
    """Return the call that this JSON describes. Raises ValueError when it describes none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise ValueError("a call needs a name")
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):  # some models write JSON within JSON
        arguments = DECODER.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments are an object")
    # Neither halves of characters, nor too deep, nor a number like 1e999, which would be read as infinity.
    from_json(json.dumps([name, arguments], ensure_ascii=False, allow_nan=False).encode())
    return ToolCall(name, arguments)


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=refuse_constant)
