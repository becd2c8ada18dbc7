"""`onbeat top`: what runs where, again and again."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.options import ApiKey, AsJson, DataDir, Url, connect, make_console

if TYPE_CHECKING:
    from rich.console import Console

    from onbeat.client import AsyncClient
    from onbeat.top import Snapshot

REFRESH_S = 2.0
UNREACHABLE_DEADLINE_S = 60.0  # a broker that restarts is no reason to stop looking


def top(
    pool: Annotated[str | None, typer.Option(help="Only this pool. Default: `default` and those of all jobs.")] = None,
    is_once: Annotated[bool, typer.Option("--once", help="One plain table, as in a pipe.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Jobs and rollouts as they run, every 2 s; q or Ctrl-C ends it."""
    from onbeat.local.run import terminations_as_interrupts
    from onbeat.progress import can_redraw
    from onbeat.top import plain_lines, take_snapshot

    console = make_console()

    async def call() -> "Snapshot | None":
        async with connect(url, api_key, data_dir) as client:
            if as_json or is_once or not can_redraw(console):
                return await take_snapshot(client, pool)
            await look_again_and_again(client, pool, console)
            return None

    with terminations_as_interrupts():
        try:
            snapshot = asyncio.run(call())
        except KeyboardInterrupt:
            return
    if snapshot is None:
        return
    if as_json:
        typer.echo(json.dumps(snapshot.as_json(), indent=2))
    else:
        typer.echo("\n".join(plain_lines(snapshot, time.time())))


async def look_again_and_again(client: "AsyncClient", pool: str | None, console: "Console") -> None:
    """Until q. Raises BrokerUnreachable when the broker stays away."""
    from rich.live import Live

    from onbeat.client import BrokerUnreachable
    from onbeat.top import TopView, take_snapshot

    async def next_snapshot() -> "Snapshot":
        await asyncio.sleep(REFRESH_S)
        return await take_snapshot(client, pool)

    snapshot = await take_snapshot(client, pool)
    seen_at = time.monotonic()
    with keys_of_terminal() as has_quit, Live(screen=True, auto_refresh=False, console=console) as live:
        quitting, asking = asyncio.create_task(has_quit.wait()), asyncio.create_task(next_snapshot())
        try:
            while not quitting.done():
                title = f"onbeat top  {client.base_url}  {time.strftime('%H:%M:%S')}  (q ends)"
                warning = silence(time.monotonic() - seen_at)
                live.update(TopView(snapshot, time.time(), title, warning), refresh=True)
                # The broker may take long to answer, or never: the screen and the keys do not wait for it.
                await asyncio.wait([quitting, asking], timeout=REFRESH_S, return_when="FIRST_COMPLETED")
                if asking.done():
                    try:
                        snapshot, seen_at = asking.result(), time.monotonic()
                    except BrokerUnreachable:
                        if time.monotonic() - seen_at > UNREACHABLE_DEADLINE_S:
                            raise
                    asking = asyncio.create_task(next_snapshot())
        finally:
            quitting.cancel()
            asking.cancel()
            await asyncio.gather(quitting, asking, return_exceptions=True)


def silence(lost_s: float) -> str:
    """What to say when the last answer is so old; '' when the next one is not late."""
    if lost_s < 2 * REFRESH_S:
        return ""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - lost_s))
    return f"the broker does not answer since {since} ({lost_s:.0f} s), trying again; all below is as of then"


@contextmanager
def keys_of_terminal() -> Iterator[asyncio.Event]:
    """An event that is set when q is pressed; keys are not shown meanwhile. Without a terminal to read from: never."""
    has_quit = asyncio.Event()
    if not sys.stdin.isatty():
        yield has_quit
        return
    import termios
    import tty

    descriptor, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read_keys() -> None:
        try:
            keys = os.read(descriptor, 64)
        except OSError:  # the terminal has gone
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
