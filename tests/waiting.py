"""Waiting for what happens in its own time. Every wait has a deadline and says what it was for."""

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ANYTHING_TRUE = object()


async def eventually(
    event: str, read: Callable[[], Any], expected: object = ANYTHING_TRUE, timeout_s: float = 10.0
) -> Any:
    """Return what `read`, which may be asynchronous, gives as soon as it is expected."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = read()
        if inspect.isawaitable(value):
            value = await value
        if value if expected is ANYTHING_TRUE else value == expected:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {event}; last seen: {value!r}"
        await asyncio.sleep(0.01)


async def until(is_true: Callable[[], object], deadline_s: float = 30.0) -> None:
    """Wait for a moment that is soon over: look more often than `eventually`."""
    async with asyncio.timeout(deadline_s):
        while not is_true():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def wait_until(is_true: Callable[[], object], event: str, deadline_s: float = 180.0, poll_s: float = 0.05) -> None:
    deadline = time.monotonic() + deadline_s
    while not is_true():
        assert time.monotonic() < deadline, f"waited {deadline_s:.0f} s in vain until {event}"
        time.sleep(poll_s)


def wait_until_gone(stat: Path) -> None:
    """Wait until the process of this file in /proc has ended."""
    wait_until(lambda: not is_running(stat), f"{stat} is gone")


def is_running(stat: Path) -> bool:
    return stat.exists() and stat.read_text().rpartition(") ")[2][0] != "Z"
