"""Calls of tools as text, for models whose template knows no tools: `name(1, "x")` calls the tool `name`."""

import ast
import re
from collections.abc import Mapping, Sequence

from onbeat.environments.session import Message
from onbeat.environments.tool_schema import Tool

MAX_BRACKETS = 16  # that are tried as the end of a call


def announce(conversation: list[Message], tools: Mapping[str, Tool]) -> None:
    """Say in the first system message, which may be a new one, which tools there are and how they are called."""
    lines = ["Call a tool by writing it with its arguments, and wait for what it returns."]
    for name, tool in tools.items():
        lines.append(f"{name}({', '.join(parameters_of(tool))}): {tool.schema()['function']['description']}")
    text = "\n".join(lines)
    if conversation and conversation[0]["role"] == "system":
        conversation[0] = {**conversation[0], "content": f"{conversation[0]['content']}\n{text}"}
    else:
        conversation.insert(0, {"role": "system", "content": text})


async def call_in_text(text: str, tools: Mapping[str, Tool]) -> list[Message]:
    """Run the first call in an answer. Return what it returned as the user's message, or nothing without a call."""
    opening = re.compile(rf"\b({'|'.join(map(re.escape, tools))})\(")
    for line in text.split("\n") if tools else ():
        if found := opening.search(line, 0, max(0, line.rfind(")"))):  # before the last bracket of its line
            tool, written = tools[found[1]], arguments_in(line[found.end() :])
            said = await tool.call(read_arguments(parameters_of(tool), written))
            return [{"role": "user", "content": f"{found[1]}({written}) = {said}"}]
    return []


def arguments_in(line: str) -> str:
    """Return the text before the first bracket that closes Python arguments; before the very first where none does.

    >>> arguments_in('"a lamp (red)") and more')
    '"a lamp (red)"'
    """
    brackets = [index for index, character in enumerate(line) if character == ")"][:MAX_BRACKETS]
    ends = (index for index in brackets if parse_arguments(line[:index]) is not None)
    return line[: next(ends, brackets[0])]


def parse_arguments(text: str) -> ast.Call | None:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return call if isinstance(call, ast.Call) else None


def parameters_of(tool: Tool) -> list[str]:
    return list(tool.schema()["function"]["parameters"].get("properties", {}))


def read_arguments(names: Sequence[str], text: str) -> dict[str, object]:
    """Read Python literals, by position or by name. Anything else is the text of the first argument.

    >>> read_arguments(["a", "b"], "1, b=2")
    {'a': 1, 'b': 2}
    """
    try:
        call = parse_arguments(text)
        assert call is not None
        values = [ast.literal_eval(argument) for argument in call.args]
        named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (ValueError, TypeError, SyntaxError, AssertionError, MemoryError, RecursionError):
        return dict.fromkeys(names[:1], text)
    surplus = [
        f"argument {position + 1}" for position in range(len(names), len(values))
    ]  # no parameter has such a name
    return dict(zip([*names, *surplus], values, strict=False)) | named
