"""Calls of tools in the text of an answer, in the form of Hermes and Qwen:

    <tool_call>
    {"name": "search", "arguments": {"query": "onbeat"}}
    </tool_call>

A block that does not hold such JSON, or that is not closed, stays plain text: the policy learns that it calls nothing.
"""

import json
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """Return the text without the calls in it, and the calls. Text without any is returned as it is."""
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
