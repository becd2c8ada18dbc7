"""A live view of a broker's answers: `onbeat jobs watch` and `onbeat top`.

look_until    asks the broker every LOOK_S seconds, and draws in between: neither the screen nor the keys wait for
              an answer. A broker that goes away is waited for.
live_view     draws on the terminal: below what was printed before, or on the whole screen
press_of_q    an event for the key q
"""

import asyncio
import os
import sys
import termios
import time
import tty
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, RenderableType
from rich.live import Live

from onbeat.client import BrokerUnreachable

LOOK_S = 2.0  # time between an answer and the next request
REDRAW_S = 0.5
LATE_S = 6.0  # an answer can only be older than this when the broker does not answer
UNREACHABLE_DEADLINE_S = 60.0  # long enough for a restart of the broker


async def look_until(
    has_ended: asyncio.Event, look: Callable[[], Awaitable[None]], redraw: Callable[[float], None]
) -> None:
    """Call `look` every LOOK_S, and `redraw` with the seconds since it last returned, until the event is set.

    Raise BrokerUnreachable when the broker stays away; errors of `look` and `redraw` are passed on.
    """

    async def look_later() -> None:
        await asyncio.sleep(LOOK_S)
        await look()

    answered_at = time.monotonic()
    ending, looking = asyncio.create_task(has_ended.wait()), asyncio.create_task(look_later())
    try:
        while not has_ended.is_set():
            redraw(time.monotonic() - answered_at)
            await asyncio.wait([ending, looking], timeout=REDRAW_S, return_when="FIRST_COMPLETED")
            if looking.done():
                try:
                    looking.result()
                    answered_at = time.monotonic()
                except BrokerUnreachable:
                    if time.monotonic() - answered_at > UNREACHABLE_DEADLINE_S:
                        raise
                looking = asyncio.create_task(look_later())
    finally:
        ending.cancel()
        looking.cancel()
        await asyncio.gather(ending, looking, return_exceptions=True)


def can_redraw(console: Console) -> bool:
    """Return False in a pipe, also where colours are forced, and on a terminal that cannot move its cursor."""
    return console.is_interactive and console.file.isatty()


@contextmanager
def live_view(console: Console, is_full_screen: bool = False) -> Iterator[Callable[[RenderableType], None]]:
    """Yield a function that redraws a view in place, and does nothing in a pipe. Leave the terminal as it was, with the
    last view of one that was broken off, unless it had the whole screen."""
    if not can_redraw(console):
        yield lambda view: None
        return
    with Live(console=console, auto_refresh=False, transient=not is_full_screen, screen=is_full_screen) as live:
        size = console.size

        def draw(view: RenderableType) -> None:
            nonlocal size
            if console.size != size:  # the drawn lines break elsewhere now
                size = console.size
                console.clear()
            live.update(view, refresh=True)

        try:
            yield draw
        except BaseException:  # Ctrl-C: its numbers are the newest that there will be
            live.transient = False
            raise


@contextmanager
def press_of_q() -> Iterator[asyncio.Event]:
    """Yield an event that is set when q is pressed; without a terminal it is never set. Keys are not echoed."""
    has_quit = asyncio.Event()
    if not sys.stdin.isatty():
        yield has_quit
        return
    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read_keys() -> None:
        try:
            keys = os.read(descriptor, 64)
        except OSError:  # the terminal is gone
            keys = b""
        if not keys or b"q" in keys.lower():
            has_quit.set()

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read_keys)
    try:
        yield has_quit
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
