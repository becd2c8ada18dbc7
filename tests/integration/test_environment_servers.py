"""Environments behind real servers on loopback: MCP over stdio and HTTP, OpenEnv's WebSocket."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.server import ServerConnection, serve

from onbeat.environments import Message, Outcome, Task
from onbeat.environments.mcp import McpEnvironment
from onbeat.environments.openenv import openenv_environment
from tests.integration.test_rewards import wait_until
from tests.scripted_session import ScriptedSession, calls, says

ROOT = Path(__file__).parents[2]
TASK = Task([{"role": "user", "content": "2 + 3 ="}], "2 + 3 =", "5", seed=4)
STDIO = [sys.executable, str(ROOT / "tests/integration/mcp_server.py")]


# ---- MCP -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def url() -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(*STDIO, str(port), stderr=asyncio.subprocess.DEVNULL)
    await asyncio.to_thread(wait_until, lambda: is_listening(port))
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
    assert sorted(described) == ["add", "die", "grade", "refuse"]
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
    failure = await failure_of(McpEnvironment(url, reward_tool="judge"), says("5"))
    assert failure.startswith("the server has no tool 'judge'; it has: add, ")


async def test_mcp_server_that_dies_is_a_failure():
    failure = await failure_of(McpEnvironment(STDIO, reward="exact"), calls("die", {}), says("5"))
    assert failure == "Connection closed"


async def test_mcp_server_that_is_not_there_is_a_failure():
    for server in (["/no/such/program"], "http://127.0.0.1:9/mcp"):
        assert await failure_of(McpEnvironment(server, reward="exact"), says("5"))


async def failure_of(environment: McpEnvironment, *answers: Message) -> str:
    """What the first error says of those that the episode raised at once."""
    try:
        outcome = await environment.run(TASK, ScriptedSession(*answers))
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


# ---- OpenEnv ---------------------------------------------------------------------------------------------------------


class EchoServer:
    """An environment server that speaks OpenEnv's protocol: three steps, each rewarded by the length of its message."""

    def __init__(self) -> None:
        self.seen: list[dict] = []

    async def play(self, socket: ServerConnection) -> None:
        num_steps = 0
        async for text in socket:
            message = json.loads(text)
            self.seen.append(message)
            match message["type"]:
                case "reset":
                    data = {"observation": {"echo": "ready"}, "reward": None, "done": False}
                case "step" if "message" in message["data"]:
                    num_steps += 1
                    said = message["data"]["message"]
                    data = {"observation": {"echo": said}, "reward": len(said) / 10, "done": num_steps == 3}
                case "state":
                    await socket.send(json.dumps({"type": "state", "data": {"step_count": num_steps}}))
                    continue
                case "close":
                    return
                case _:
                    error = {"code": "VALIDATION_ERROR", "message": "message: Field required"}
                    await socket.send(json.dumps({"type": "error", "data": error}))
                    continue
            await socket.send(json.dumps({"type": "observation", "data": data}))


@pytest.fixture
async def openenv() -> AsyncIterator[tuple[str, EchoServer]]:
    server = EchoServer()
    async with serve(server.play, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", server


async def test_openenv_episode_is_played_to_its_end(openenv):
    url, server = openenv
    session = ScriptedSession(says("a"), says("bb"), says("ccc"), says("never asked"))
    outcome = await openenv_environment(url, to_text=lambda seen: seen["echo"]).run(TASK, session)
    assert outcome.reward == pytest.approx(0.6)
    assert list(outcome.turn_rewards.values()) == [0.1, 0.2, 0.3]
    assert session.asked[0] == [{"role": "user", "content": "2 + 3 =\nready"}]
    assert session.asked[1][-1] == {"role": "user", "content": "a"}
    assert [message["type"] for message in server.seen] == ["reset", "step", "step", "step", "close"]
    assert server.seen[0]["data"] == {"seed": 4}


async def test_openenv_error_is_a_failure_and_closes_the_connection(openenv):
    url, server = openenv
    environment = openenv_environment(url, to_action=lambda text: {"guess": text})
    with pytest.raises(RuntimeError, match="refuses step: VALIDATION_ERROR: message: Field required"):
        await environment.run(TASK, ScriptedSession(says("a")))
    assert server.seen[-1] == {"type": "close"}


async def test_openenv_server_that_is_not_there_is_a_failure():
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        await openenv_environment("ws://127.0.0.1:9").run(TASK, ScriptedSession(says("a")))
