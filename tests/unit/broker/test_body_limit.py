"""The deadlines of an upload: one for the whole, one for each silence. Those of other bodies: test_slow_clients.py."""

import asyncio
from collections.abc import Callable

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from services.broker.middleware import BodyLimit, BodyRule


async def not_sent(_: Message) -> None:
    raise AssertionError("nothing is to be sent")


@pytest.fixture
async def advance(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock of the event loop by so many seconds; it stands still otherwise."""
    now_s = 0.0

    def advance(by_s: float) -> None:
        nonlocal now_s
        now_s += by_s

    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    return advance


def client(advance: Callable[[float], None], *messages: tuple[float, Message]) -> Receive:
    """Each message comes so many seconds after the one before."""
    coming = iter(messages)

    async def receive() -> Message:
        pause_s, message = next(coming)
        advance(pause_s)
        for _ in range(3):  # turns of the loop in which a deadline that is over ends this wait
            await asyncio.sleep(0)
        return message

    return receive


def part(more_body: bool) -> Message:
    return {"type": "http.request", "body": b"x", "more_body": more_body}


async def test_upload_may_take_long_but_not_fall_silent(advance):
    async def read_all(_: Scope, receive: Receive, send: Send) -> None:
        """Reads the body and waits for the client to go, as an event stream does."""
        while (await receive())["type"] != "http.disconnect":
            pass

    uploading: Scope = {"type": "http", "method": "PUT", "path": "/v1/datasets/rows.jsonl", "headers": []}
    timeout_s = 2.0
    upload = BodyRule(1000, 10 * timeout_s, silence_s=timeout_s)
    rule = BodyRule(1000, timeout_s)
    steady = [(0.9 * timeout_s, part(True))] * 5
    end = [(0.0, part(False)), (0.0, {"type": "http.disconnect"})]
    await BodyLimit(read_all, rule, upload)(uploading, client(advance, *steady, *end), not_sent)
    with pytest.raises(HTTPException, match="within 20 s"):  # longer than the whole may take
        await BodyLimit(read_all, rule, upload)(uploading, client(advance, *steady * 3, *end), not_sent)
    silent = [(0.0, part(True)), (1.1 * timeout_s, part(True))]
    with pytest.raises(HTTPException, match="nothing more of the body came for 2 s"):
        await BodyLimit(read_all, rule, upload)(uploading, client(advance, *silent), not_sent)
