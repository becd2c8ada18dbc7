"""Tools of an MCP server. Each episode has a connection of its own, and a command's process of its own.

Commands and addresses come from the package that the operator installed, never from a job:

    def weather() -> McpEnvironment:                       # installed under `onbeat.environments`
        return McpEnvironment(["weather-server"], reward="exact")
"""

import functools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from onbeat.environments.final_reward import check_reward, last_answer, reward_of_answer
from onbeat.environments.session import Message, Session
from onbeat.environments.tool_schema import Tool, write_json
from onbeat.environments.tools import as_outcome, converse
from onbeat.environments.types import Outcome, Task

INVALID_PARAMS = -32602  # JSON-RPC: the policy called the tool wrongly
ANSWER_S = 60.0
STOP_S = 1.0  # a server that was asked to stop has this long; MCP's client waits for two seconds


class McpEnvironment:
    """An environment of a server's tools. `server` is a command or a URL. The reward of an episode is an installed
    reward of the last answer, or the number that the tool `reward_tool` returns, which the policy does not see."""

    def __init__(
        self,
        server: Sequence[str] | str,
        *,
        reward: str | None = None,
        reward_options: Mapping[str, Any] | None = None,
        reward_tool: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        if (reward is None) == (reward_tool is None):
            raise ValueError("an MCP environment needs either `reward`, an installed one, or `reward_tool`")
        if reward is not None:
            check_reward(reward)
        self._server = check_server(server, variables or {})
        self._reward, self._reward_options, self._reward_tool = reward, dict(reward_options or {}), reward_tool

    async def run(self, task: Task, policy: Session) -> Outcome:
        from mcp import Client

        conversation = list(task.messages)
        async with Client(self._server, read_timeout_seconds=ANSWER_S) as client:
            tools = await tools_of(client)
            scorer = tools.pop(self._reward_tool, None) if self._reward_tool is not None else None
            if self._reward is None and scorer is None:  # before the policy answers in vain
                raise ValueError(f"the server has no tool {self._reward_tool!r}; it has: {', '.join(tools)}")
            await converse(conversation, tools, policy)
            if scorer is not None:
                return Outcome(await score(scorer, task, conversation))
            assert self._reward is not None
            return as_outcome(await reward_of_answer(self._reward, self._reward_options, task, conversation))


def check_server(server: Sequence[str] | str, variables: Mapping[str, str]) -> Any:
    """Return what MCP's client connects to. Raises ImportError, with the remedy, without the package."""
    try:
        from mcp import StdioServerParameters
    except ImportError as error:
        raise ImportError("MCP environments need the package mcp on every rollout: pip install 'mcp>=2.3'") from error
    if isinstance(server, str):
        return server
    # A guard leads a session of its own, which a kill of this process's group does not reach: it ends by itself, and no
    # process that the server has started outlives it.
    command = ["-I", "-m", "onbeat.process.guard", str(os.getpid()), str(STOP_S), *server]
    return StdioServerParameters(command=sys.executable, args=command, env=dict(variables))


async def tools_of(client: Any) -> dict[str, Tool]:
    """Return the tools of a connected server by name."""
    tools: dict[str, Tool] = {}
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            call = functools.partial(call_tool, client, tool.name)
            tools[tool.name] = Tool(tool.name, tool.description or "", tool.input_schema, call)
        cursor = page.next_cursor
        if not cursor:
            return tools


async def call_tool(client: Any, name: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of what the server answers; also when it says that the call was wrong. A server that is gone
    raises."""
    from mcp import MCPError

    try:
        result = await client.call_tool(name, dict(arguments))
    except MCPError as error:
        if error.code != INVALID_PARAMS:
            raise
        return f"Error: {error.message}"
    parts = [text_of(content) for content in result.content]
    structured = result.structured_content
    if structured is not None and not is_said(
        structured, [part.text for part in result.content if part.type == "text"]
    ):
        parts.append(write_json(structured))
    return "\n".join(["Error:", *parts] if result.is_error else parts)


def is_said(structured: Any, texts: Sequence[str]) -> bool:
    """Return whether texts say what the structured content says, as most servers do for clients that read only text.
    Several texts are the items of a list, and a value that is no object is the `result` of one.

    >>> is_said({"result": [1, 2]}, ["1", "2"]), is_said({"rows": [1, 2]}, ["2 rows"])
    (True, False)
    """
    values = [parse(text) for text in texts]
    said = [values, list(texts), *values, *texts] if texts else []
    return structured in said or structured in [{"result": value} for value in said]


def parse(text: str) -> Any:
    """Return what a text means as JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def text_of(content: Any) -> str:
    """Return a part of an answer as the policy reads it: text whole, of anything else what it is. Raises ValueError for
    a kind of content that is not known."""
    match content.type:
        case "text":
            return str(content.text)
        case "image" | "audio":
            return f"({content.type}, {content.mime_type}: not shown)"
        case "resource":
            resource = content.resource
            about = ", ".join(filter(None, (str(resource.uri), resource.mime_type)))
            text = getattr(resource, "text", None)  # others hold bytes
            return f"(resource {about}: not shown)" if text is None else f"(resource {about})\n{text}"
        case "resource_link":
            about = ", ".join(filter(None, (content.title or content.name, content.mime_type, content.description)))
            return f"(link to the resource {content.uri}: {about})"
    raise ValueError(f"the server answered with content of the kind {content.type!r}, which is not known here")


async def score(scorer: Tool, task: Task, conversation: Sequence[Message]) -> float:
    """Ask the server for the reward, with `response`, `answer` and `question` where the tool has such parameters."""
    given = {"response": last_answer(conversation), "answer": task.answer, "question": task.question}
    known = scorer.parameters.get("properties", {})
    said = await scorer.call({name: value for name, value in given.items() if name in known})
    try:
        return float(said)
    except ValueError as error:
        raise ValueError(f"the tool {scorer.name} returned {said[:200]!r}, not a number") from error
