"""`onbeat data`: the data files that a broker has."""

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from onbeat.cli.jobs import print_json, print_table
from onbeat.cli.options import ApiKey, AsJson, DataDir, Url, ask

app = typer.Typer(help="Upload, list and delete the data files of a broker.", no_args_is_help=True)


@app.command()
def push(
    file: Annotated[Path, typer.Argument(help="A JSONL or Parquet file.", show_default=False)],
    name: Annotated[str | None, typer.Option(help="Name to upload as. Default: its own, with its digest.")] = None,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Upload a file, unless the broker has it, and print its path, the data.path of a job."""
    typer.echo(ask(url, api_key, data_dir, lambda client: client.datasets.push(file, name)).path)


@app.command("list")
def list_files(as_json: AsJson = False, url: Url = None, api_key: ApiKey = None, data_dir: DataDir = None) -> None:
    """List the uploaded files, newest first."""
    found = ask(url, api_key, data_dir, lambda client: client.datasets.list())
    if as_json:
        print_json(found)
        return
    rows = [
        (
            record.path,
            f"{record.num_bytes:,}",
            datetime.fromtimestamp(record.uploaded_at).strftime("%Y-%m-%d %H:%M:%S"),
            (record.sha256 or "-")[:16],
        )
        for record in found
    ]
    print_table(["path", "bytes", "uploaded", "sha256"], rows)


@app.command()
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As `onbeat data list` shows it.", show_default=False)],
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
) -> None:
    """Remove a file that no unfinished job reads."""
    short = name.removeprefix("datasets/")
    ask(url, api_key, data_dir, lambda client: client.datasets.delete(short))
    typer.echo(f"{short} deleted")
