"""Work for an HTTP client that may hang up before it is done."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]  # ASGI's receive


async def unless_left(receive: Receive, work: Awaitable[T]) -> T | None:
    """Return the result, or None when the client hung up before: the work is cancelled then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:  # this may have been cancelled: the server stops
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working, leaving})
    return None if working.cancelled() else working.result()


async def until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
