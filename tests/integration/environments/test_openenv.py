"""Environments behind OpenEnv's own server, from its package on PyPI."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import InvalidStatus
from websockets.http11 import Request, Response

from onbeat.environments import Task, openenv
from onbeat.environments.openenv import OpenEnvGame, openenv_environment
from tests.conftest import free_port
from tests.installed import install_lock
from tests.integration.environments.test_servers import is_listening
from tests.scripted_session import ScriptedSession, says
from tests.waiting import wait_until

pytestmark = pytest.mark.rare

ROOT = Path(__file__).parents[3]
TASK = Task([{"role": "user", "content": "Speak."}], "Speak.", "", seed=4)


@pytest.fixture(scope="module")
def packages() -> Path:
    return install_lock(ROOT / "requirements/openenv.lock")


@contextmanager
def serving(program: Path, packages: Path) -> Iterator[str]:
    """Run a server's program with these packages. Yield its URL."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, str(program), str(port)], env=os.environ | {"PYTHONPATH": str(packages)}
    )
    try:
        wait_until(lambda: is_listening(port), "it listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url(packages: Path) -> Iterator[str]:
    """Run a server that holds at most two episodes, and yield its URL."""
    with serving(Path(__file__).with_name("openenv_server.py"), packages) as url:
        yield url


async def test_episode_is_played_to_its_end(url):
    session = ScriptedSession(says("a"), says("bb"), says("ccc"), says("never asked"))
    outcome = await openenv_environment(url, to_text=lambda seen: seen["text"]).run(TASK, session)
    assert outcome.reward == pytest.approx(0.6)
    assert list(outcome.turn_rewards.values()) == [0.1, 0.2, 0.3]
    assert session.asked[0] == [{"role": "user", "content": "Speak.\nseed 4"}]
    assert session.asked[1][-1] == {"role": "user", "content": "a"}


async def test_episodes_side_by_side_have_games_of_their_own(url):
    environment = openenv_environment(url)
    scripts = [[says(letter * length) for length in (1, 2, 3)] for letter in "ab"]
    outcomes = await asyncio.gather(*(environment.run(TASK, ScriptedSession(*script)) for script in scripts))
    assert [outcome.reward for outcome in outcomes] == pytest.approx([0.6, 0.6])


async def test_refused_actions_are_failures_and_give_back_their_place(url):
    environment = openenv_environment(url, to_action=lambda text: {"guess": text})
    for _ in range(4):
        with pytest.raises(RuntimeError, match="refuses step: VALIDATION_ERROR: "):
            await environment.run(TASK, ScriptedSession(says("a")))


async def test_error_of_the_environment_is_a_failure(url):
    with pytest.raises(RuntimeError, match=r"refuses step: EXECUTION_ERROR: .*the parrot is gone"):
        await openenv_environment(url).run(TASK, ScriptedSession(says("die")))


async def test_server_without_a_free_place_is_a_failure(url):
    games = [game_of(url), game_of(url)]
    for game in games:
        await game.init(TASK.messages, seed=1)
    with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
        await openenv_environment(url).run(TASK, ScriptedSession(says("a")))
    for game in games:
        await game.close()


def game_of(url: str) -> OpenEnvGame:
    return OpenEnvGame(url, lambda text: {"message": text}, str)


async def test_server_that_is_not_there_is_a_failure():
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        await openenv_environment("ws://127.0.0.1:9").run(TASK, ScriptedSession(says("a")))


@asynccontextmanager
async def game_on(step: Callable[[ServerConnection], Awaitable[None]]) -> AsyncIterator[OpenEnvGame]:
    """Yield a game of long messages on a server that has answered `reset`, and misbehaves at the first step."""

    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send('{"type": "observation", "data": {"observation": "begin"}}')
        await step(connection)

    async with serve(answer, "127.0.0.1", 0, close_timeout=0.1) as server:
        port = server.sockets[0].getsockname()[1]
        game = OpenEnvGame(f"ws://127.0.0.1:{port}", lambda text: {"message": text * 10_000_000}, str)
        await game.init([{"role": "user", "content": "Speak."}], 4)
        yield game


ANSWERS_OF_OTHER_SHAPES = [
    "[]",
    "no JSON",
    "[" * 100_000,
    '{"type": "observation"}',
    '{"type": "observation", "data": []}',
    '{"type": "observation", "data": {}}',
    '{"type": "observation", "data": {"observation": "", "reward": "much"}}',
]


@pytest.mark.parametrize("answer", ANSWERS_OF_OTHER_SHAPES)
async def test_answer_of_another_shape_is_a_failure_with_its_text(answer):
    async with game_on(lambda connection: connection.send(answer)) as game:
        with pytest.raises(RuntimeError, match="the OpenEnv server has answered step with"):
            await game.step({"content": ""})
        await game.close()


async def test_redirect_to_another_server_is_not_followed():
    reached = asyncio.Event()

    async def reach(connection: ServerConnection) -> None:
        reached.set()

    async with serve(reach, "127.0.0.1", 0) as other:
        place = f"ws://127.0.0.1:{other.sockets[0].getsockname()[1]}/x"

        def redirect(connection: ServerConnection, request: Request) -> Response:
            response = connection.respond(302, "")
            response.headers["Location"] = place
            return response

        async with serve(reach, "127.0.0.1", 0, process_request=redirect) as server:
            game = game_of(f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with pytest.raises(InvalidStatus, match="302"):
                await game.init([{"role": "user", "content": "Speak."}], 4)
    assert not reached.is_set()


async def test_server_that_hangs_up_counts_as_unreachable():
    async with game_on(ServerConnection.close) as game:
        with pytest.raises(ConnectionError, match="the OpenEnv server has not answered step: received 1000"):
            await game.step({"content": "a"})
        await game.close()


async def test_server_that_reads_nothing_holds_up_no_step_and_no_end(monkeypatch):
    monkeypatch.setattr(openenv, "ANSWER_S", 0.5)
    monkeypatch.setattr(openenv, "CLOSE_S", 0.1)
    is_over = asyncio.Event()

    async def read_nothing(connection: ServerConnection) -> None:
        connection.transport.pause_reading()
        await is_over.wait()

    async with game_on(read_nothing) as game:
        assert game._socket.ping_interval is None  # pings that are not answered would break off a long step
        try:
            async with asyncio.timeout(8):
                with pytest.raises(TimeoutError, match=r"has not answered step for 0\.5 s"):
                    await game.step({"content": "aaaa"})
                await game.close()
        finally:
            is_over.set()


async def test_server_that_hangs_does_not_hold_up_the_end(monkeypatch):
    monkeypatch.setattr(openenv, "ANSWER_S", 0.5)
    monkeypatch.setattr(openenv, "CLOSE_S", 0.1)
    is_over = asyncio.Event()

    async def hang(connection: ServerConnection) -> None:
        connection.transport.pause_reading()  # so that it never hears that the client closes
        await is_over.wait()

    async with serve(hang, "127.0.0.1", 0, close_timeout=0.1) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            with pytest.raises(TimeoutError, match=r"the OpenEnv server has not answered reset for 0\.5 s"):
                async with asyncio.timeout(8):  # websockets by itself waits for ten seconds
                    await openenv_environment(f"ws://127.0.0.1:{port}").run(TASK, ScriptedSession(says("a")))
        finally:
            is_over.set()
