"""Environments behind OpenEnv's WebSocket: `reset`, `step` and `close`, one connection per episode.

The address comes from the package that the operator installed, never from a job:

    def wordle() -> Environment:                           # installed under `onbeat.environments`
        return openenv_environment("ws://127.0.0.1:8000", to_action=lambda text: {"guess": text})
"""

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable
from typing import Any

from onbeat.environments.messages import MessageEnvironment
from onbeat.environments.session import Message

CONNECT_S = 10.0
ANSWER_S = 60.0
CLOSE_S = 2.0  # a server that hangs must not hold up the end of an episode
MAX_MESSAGE_BYTES = 16 << 20

Observation = dict[str, Any]


def openenv_environment(
    url: str,
    *,
    to_action: Callable[[str], dict[str, Any]] = lambda text: {"message": text},
    to_text: Callable[[Observation], str] = json.dumps,
) -> MessageEnvironment:
    """Return an environment of a server. `to_action` makes an action of the policy's text, `to_text` a message of an
    observation; the first one is appended to the prompt. Raises ImportError, with the remedy, without websockets."""
    try:
        import websockets  # noqa: F401
    except ImportError as error:
        raise ImportError("OpenEnv environments need the package websockets: pip install websockets") from error
    return MessageEnvironment(functools.partial(OpenEnvGame, url, to_action, to_text))


class OpenEnvGame:
    """One episode on a server. Its reward is the sum of what the steps give."""

    def __init__(
        self, url: str, to_action: Callable[[str], dict[str, Any]], to_text: Callable[[Observation], str]
    ) -> None:
        self._url = url.rstrip("/").replace("http", "ws", 1) if url.startswith("http") else url.rstrip("/")
        self._to_action, self._to_text = to_action, to_text
        self._socket: Any = None

    async def init(self, prompt: list[Message], seed: int) -> list[Message]:
        from websockets.asyncio.client import connect

        connection = connect(
            f"{self._url}/ws",
            open_timeout=CONNECT_S,
            close_timeout=CLOSE_S,
            max_size=MAX_MESSAGE_BYTES,
            compression=None,
            ping_interval=None,  # a server that computes a step may answer no ping; ANSWER_S is the limit
        )
        # A redirect is an error: the operator has named the server.
        connection.process_redirect = lambda exc: exc  # type: ignore[method-assign]
        self._socket = await connection
        first = self._to_text((await self._ask("reset", {"seed": seed}))["observation"])
        return [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}\n{first}"}]

    async def step(self, message: Message) -> tuple[str, float, bool]:
        result = await self._ask("step", self._to_action(message["content"] or ""))
        reward = result.get("reward") or 0.0
        if not isinstance(reward, int | float):
            shown = str(reward)[:200]
            raise RuntimeError(f"the OpenEnv server has answered step with the reward {shown!r}, not a number")
        return self._to_text(result["observation"]), reward, bool(result.get("done"))

    async def close(self) -> None:
        if self._socket is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._send({"type": "close"})
                await self._socket.close()
        except TimeoutError:  # the server reads nothing, or does not say goodbye
            self._socket.transport.abort()

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send one message and return the data of the answer. Raises RuntimeError when the server reports an error,
        ConnectionError when it hangs up, TimeoutError when it is silent."""
        from websockets.exceptions import ConnectionClosed

        try:
            async with asyncio.timeout(ANSWER_S):
                await self._send({"type": kind, "data": data})
                text = await self._socket.recv()
        except TimeoutError as error:
            raise TimeoutError(f"the OpenEnv server has not answered {kind} for {ANSWER_S:g} s") from error
        except ConnectionClosed as error:
            raise ConnectionError(f"the OpenEnv server has not answered {kind}: {error}") from error
        return read_answer(kind, text)

    async def _send(self, message: dict[str, Any]) -> None:
        """Send a message. A server that has hung up may have said why: the next answer is that, or raises."""
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            await self._socket.send(json.dumps(message))


def read_answer(kind: str, text: str | bytes) -> dict[str, Any]:
    """Return the data of an answer. Raises RuntimeError for an error that the server reports, and for another shape."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        answer = None
    data = answer.get("data") if isinstance(answer, dict) else None
    if isinstance(answer, dict) and isinstance(data, dict):
        if answer.get("type") == "error":
            raise RuntimeError(f"the OpenEnv server refuses {kind}: {data.get('code')}: {data.get('message')}")
        if "observation" in data:
            return data
    raise RuntimeError(f"the OpenEnv server has answered {kind} with {text[:200]!r}, which has no data.observation")
