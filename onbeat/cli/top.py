"""`onbeat top`: the jobs and rollouts of a broker, refreshed."""

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.options import AsJson, Broker, make_console

if TYPE_CHECKING:
    from onbeat.client import AsyncClient
    from onbeat.terminal.top import Overview


def top(
    broker: Broker,
    pool: Annotated[
        str | None, typer.Option(help="Only this pool. Default: `default` and the pools of all jobs.")
    ] = None,
    is_once: Annotated[bool, typer.Option("--once", help="Print one plain table and exit, as in a pipe.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show jobs and rollouts as they run, refreshed every 2 s; q or Ctrl-C ends it."""
    from onbeat.local.run import terminations_as_interrupts
    from onbeat.terminal.live import can_redraw
    from onbeat.terminal.top import plain_lines, show_top, take_overview

    console = make_console()

    async def look(client: "AsyncClient") -> "Overview | None":
        if as_json or is_once or not can_redraw(console):
            return await take_overview(client, pool)
        await show_top(client, pool, console)
        return None

    with terminations_as_interrupts():
        try:
            overview = broker.ask(look)
        except KeyboardInterrupt:
            return
    if overview is None:
        return
    if as_json:
        typer.echo(json.dumps(overview.as_json(), indent=2))
    else:
        typer.echo("\n".join(plain_lines(overview, time.time())))
