"""`onbeat data`: the data files of a broker."""

from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import typer

from onbeat.cli.options import App, AsJson, Broker
from onbeat.cli.output import print_records, when
from onbeat.contracts.errors import ApiError, OnbeatError

app = App("Upload, list and delete the data files of a broker.")


@app.command()
def push(
    broker: Broker,
    file: Annotated[Path, typer.Argument(help="A JSONL or Parquet file.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name at the broker. Default: its own, with its digest.")] = None,
) -> None:
    """Upload a file, unless the broker already has it, and print the path to set as data.path of a job."""
    typer.echo(broker.change(lambda client: client.datasets.push(file, name)).path)


@app.command("list")
def list_files(broker: Broker, as_json: AsJson = False) -> None:
    """List the uploaded files, newest first."""
    datasets = broker.ask(lambda client: client.datasets.list())
    print_records(
        datasets,
        as_json,
        ["path", "bytes", "uploaded", "sha256"],
        lambda file: (file.path, f"{file.num_bytes:,}", when(file.uploaded_at), (file.sha256 or "-")[:16]),
    )


@app.command()
def delete(
    broker: Broker,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of a file, as `onbeat data list` shows it.", show_default=False)
    ],
) -> None:
    """Remove a file that no unfinished job reads."""
    short = name.removeprefix("datasets/")
    try:
        broker.change(lambda client: client.datasets.delete(short))
    except ApiError as refusal:
        if refusal.status != HTTPStatus.NOT_FOUND:
            raise
        raise OnbeatError(f"there is no data file {short!r}; `onbeat data list` shows them") from refusal
    typer.echo(f"{short} deleted")
