"""`onbeat view` and `onbeat report`: a run that is over."""

import time
from pathlib import Path
from typing import Annotated

import typer

from onbeat.cli.options import Broker, JobId


def view(
    folder: Annotated[
        Path | None, typer.Argument(help="The data folder of a run. Default: ONBEAT_DATA_DIR, else ./.onbeat")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8800 if it is free.")] = None,
) -> None:
    """Show the dashboard for the jobs of a data folder, read-only, until Ctrl-C."""
    from onbeat.local.redis_server import free_port
    from onbeat.local.run import terminations_as_interrupts
    from onbeat.local.stack import LocalStack, StackOptions
    from onbeat.local.state import resolve_data_dir, running_stack

    folder = resolve_data_dir(folder)
    state = running_stack(folder)
    if state is not None:
        typer.echo(f"a stack runs on {folder} already: open {state.url}")
        return
    if not (folder / "redis").is_dir():
        raise ValueError(f"{folder} is no data folder of a run: it has no folder redis")
    options = StackOptions(folder, port=port or free_port(preferred=8800), is_view=True)
    with terminations_as_interrupts():
        try:
            with LocalStack(options, command="view", report=typer.echo) as stack:
                typer.echo(f"open {stack.url}; Ctrl-C ends it")
                while True:
                    stack.check()
                    time.sleep(0.5)
        except KeyboardInterrupt:
            typer.echo("ended")


def report(
    broker: Broker,
    job_id: JobId,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
) -> None:
    """Write a job's numbers, curves and responses into one HTML file, which can be sent to others."""
    from onbeat.terminal.report import check_report_path, write_whole
    from onbeat.terminal.report_page import build_page

    check_report_path(output)
    write_whole(output, broker.ask(lambda client: build_page(client, job_id)))
    typer.echo(f"{output} is written")
