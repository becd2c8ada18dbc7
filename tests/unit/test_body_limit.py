"""The deadline of a request's body is over when it is here: who listens on, for the client's end, has none."""

import asyncio

import pytest
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from services.broker.middleware import BodyLimit

TIMEOUT_S = 0.1
SCOPE: Scope = {"type": "http", "headers": []}


async def read_all(_: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and waits for the client to go, as an event stream does."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def not_sent(_: Message) -> None:
    raise AssertionError("nothing is to be sent")


def client(*messages: tuple[float, Message]) -> Receive:
    """Each message comes so many seconds after the one before."""
    coming = iter(messages)

    async def receive() -> Message:
        pause_s, message = next(coming)
        await asyncio.sleep(pause_s)
        return message

    return receive


def part(more_body: bool) -> Message:
    return {"type": "http.request", "body": b"x", "more_body": more_body}


async def test_client_that_listens_for_long_is_not_cut_off() -> None:
    messages = [(0.0, part(True)), (0.05, part(False)), (4 * TIMEOUT_S, {"type": "http.disconnect"})]
    await BodyLimit(read_all, 1000, TIMEOUT_S)(SCOPE, client(*messages), not_sent)


async def test_body_has_one_deadline_however_many_parts_come() -> None:
    with pytest.raises(HTTPException) as refused:
        await BodyLimit(read_all, 1000, TIMEOUT_S)(SCOPE, client(*[(0.04, part(True))] * 10), not_sent)
    assert refused.value.status_code == 408
