"""Environments behind a real MCP server on loopback, over stdio and HTTP."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from onbeat.environments import Message, Outcome, Task
from onbeat.environments.mcp import McpEnvironment
from onbeat.environments.openenv import openenv_environment
from tests.scripted_session import ScriptedSession, calls, says
from tests.waiting import eventually, wait_until

ROOT = Path(__file__).parents[3]
TASK = Task([{"role": "user", "content": "2 + 3 ="}], "2 + 3 =", "5", seed=4)
STDIO = [sys.executable, str(ROOT / "tests/integration/environments/mcp_server.py")]


# ---- MCP -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def url() -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(*STDIO, str(port), stderr=asyncio.subprocess.DEVNULL)
    await asyncio.to_thread(wait_until, lambda: is_listening(port), "it listens")
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    await process.wait()


def is_listening(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/", timeout=5)
    except httpx.TransportError:
        return False
    return True


async def test_mcp_tools_over_stdio():
    session = ScriptedSession(calls("add", {"a": 2, "b": 3}), calls("refuse", {}), calls("add", {"a": "x"}), says("5"))
    outcome = await McpEnvironment(STDIO, reward="exact").run(TASK, session)
    assert outcome == Outcome(1.0)
    described = {tool["function"]["name"]: tool["function"] for tool in session.tools}
    assert sorted(described) == ["add", "die", "grade", "refuse", "start"]
    assert described["add"]["description"] == "Add two numbers."
    assert described["add"]["parameters"]["required"] == ["a", "b"]
    results = [messages[-1]["content"] for messages in session.asked[1:]]
    assert results[0] == "5"
    assert results[1].startswith("Error:")
    assert "not today" in results[1]
    assert results[2].startswith("Error:")


async def test_mcp_tools_over_http_and_the_reward_of_a_tool(url):
    session = ScriptedSession(calls("add", {"a": 2, "b": 3}), says("it is 5"))
    environment = McpEnvironment(url, reward_tool="grade")
    assert await environment.run(TASK, session) == Outcome(0.5)
    assert "grade" not in {tool["function"]["name"] for tool in session.tools}
    failure = await failure_of(environment, says("no idea"))
    assert failure == "the tool grade returned 'nothing', not a number"
    unasked = ScriptedSession(says("5"))
    failure = await failure_of(McpEnvironment(url, reward_tool="judge"), session=unasked)
    assert failure.startswith("the server has no tool 'judge'; it has: add, ")
    assert unasked.asked == []


async def test_mcp_server_that_dies_is_a_failure():
    failure = await failure_of(McpEnvironment(STDIO, reward="exact"), calls("die", {}), says("5"))
    assert failure == "Connection closed"


async def test_mcp_server_that_is_not_there_is_a_failure():
    for server in (["/no/such/program"], "http://127.0.0.1:9/mcp"):
        assert await failure_of(McpEnvironment(server, reward="exact"), says("5"))


async def failure_of(environment: McpEnvironment, *answers: Message, session: ScriptedSession | None = None) -> str:
    """Return the message of the first of the errors that the episode raised at once."""
    try:
        outcome = await environment.run(TASK, session or ScriptedSession(*answers))
    except Exception as raised:
        error = raised
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        return str(error)
    raise AssertionError(outcome)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ImportError, match="need the package mcp on every rollout"):
        McpEnvironment(STDIO, reward="exact")
    monkeypatch.setitem(sys.modules, "websockets", None)
    with pytest.raises(ImportError, match="need the package websockets"):
        openenv_environment("ws://127.0.0.1:9")


def test_mcp_environment_needs_one_reward():
    for rewards in ({}, {"reward": "exact", "reward_tool": "grade"}):
        with pytest.raises(ValueError, match="either `reward`, an installed one, or `reward_tool`"):
            McpEnvironment(STDIO, **rewards)
    with pytest.raises(ValueError, match="no reward 'exakt' is installed here; there are: exact, "):
        McpEnvironment(STDIO, reward="exakt")


@pytest.mark.parametrize("end", [says("5"), calls("die", {})], ids=["closed", "died"])
async def test_processes_of_an_mcp_server_end_with_it(end):
    session = ScriptedSession(calls("start", {"command": "sleep 600"}), end, says("5"))
    with contextlib.suppress(Exception):  # the one that died
        await McpEnvironment(STDIO, reward="exact").run(TASK, session)
    started = [int(pid) for pid in session.asked[1][-1]["content"].split()]
    assert len(started) == 2
    await eventually("they are gone", lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
