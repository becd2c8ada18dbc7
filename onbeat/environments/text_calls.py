"""Calls of tools as text, for models whose template knows no tools: `name(1, "x")` calls the tool `name`."""

import ast
import re
from collections.abc import Mapping, Sequence

from onbeat.environments.session import Message
from onbeat.environments.tool_schema import Tool

MAX_BRACKETS = 16  # brackets that are tried as the end of a call
NO_PYTHON = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)  # exceptions of `ast` for other text


def announce(conversation: list[Message], tools: Mapping[str, Tool]) -> None:
    """Say in the first system message, which may be a new one, which tools there are and how they are called."""
    lines = ["Call a tool by writing it with its arguments, and wait for what it returns."]
    lines += [f"{name}({', '.join(parameters_of(tool))}): {tool.description}" for name, tool in tools.items()]
    text = "\n".join(lines)
    if conversation and conversation[0]["role"] == "system":
        conversation[0] = {**conversation[0], "content": f"{conversation[0]['content']}\n{text}"}
    else:
        conversation.insert(0, {"role": "system", "content": text})


async def call_in_text(text: str, tools: Mapping[str, Tool]) -> list[Message]:
    """Run the first call in an answer. Return what it returned as the user's message, or nothing without a call."""
    opening = re.compile(rf"\b({'|'.join(map(re.escape, tools))})\(")
    for line in text.split("\n") if tools else ():
        if match := opening.search(line, 0, max(0, line.rfind(")"))):  # before the last bracket of its line
            tool = tools[match[1]]
            written, arguments = read_arguments(parameters_of(tool), line[match.end() :])
            return [{"role": "user", "content": f"{match[1]}({written}) = {await tool.call(arguments)}"}]
    return []


def parameters_of(tool: Tool) -> list[str]:
    return list(tool.parameters.get("properties", {}))


def read_arguments(names: Sequence[str], line: str) -> tuple[str, dict[str, object]]:
    """Return the text up to the bracket that closes a call, and its arguments: Python literals by position or by name.
    Any other text is the first argument; it ends at the very first bracket if none closes Python arguments.

    >>> read_arguments(["a", "b"], '"a lamp (red)", b=2) and more')
    ('"a lamp (red)", b=2', {'a': 'a lamp (red)', 'b': 2})
    """
    ends = [index for index, character in enumerate(line) if character == ")"][:MAX_BRACKETS]
    calls = ((line[:end], parse_call(line[:end])) for end in ends)
    written, call = next((candidate for candidate in calls if candidate[1] is not None), (line[: ends[0]], None))
    try:
        assert call is not None
        values = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (AssertionError, *NO_PYTHON):
        return written, dict.fromkeys(names[:1], written)
    surplus = [f"argument {index + 1}" for index in range(len(names), len(values))]  # no parameter has such a name
    return written, dict(zip([*names, *surplus], values, strict=False)) | named


def parse_call(arguments: str) -> ast.Call | None:
    try:
        call = ast.parse(f"f({arguments})", mode="eval").body
    except NO_PYTHON:
        return None
    return call if isinstance(call, ast.Call) else None
