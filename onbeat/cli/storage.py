"""`onbeat backup`, `restore` and `clean`: the data folder of a local stack as a whole."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from onbeat.cli.options import AsJson, DataDir
from onbeat.cli.output import print_json, print_table
from onbeat.process.stacks import resolve_data_dir


def backup(
    file: Annotated[Path, typer.Argument(help="The file to write, a tar. It must not exist.", show_default=False)],
    data_dir: DataDir = None,
) -> None:
    """Write the jobs of the local stack into one file: ledger, checkpoints, data files. The stack may run on."""
    from onbeat.local.backup import write_backup
    from onbeat.terminal.formatting import size

    contents = write_backup(resolve_data_dir(data_dir), file)
    jobs = f"{len(contents.jobs)} job" + "s" * (len(contents.jobs) != 1)
    typer.echo(f"{file} is written: {jobs}, {size(file.stat().st_size)}")
    typer.echo(f"bring it back: onbeat restore {shlex.quote(str(file))} --data-dir FOLDER")


def restore(
    file: Annotated[Path, typer.Argument(help="A file that `onbeat backup` wrote.", show_default=False)],
    data_dir: DataDir = None,
) -> None:
    """Make a data folder from a backup. Nothing is overwritten: the folder must be new or empty."""
    from onbeat.local.restore import restore_backup

    folder = resolve_data_dir(data_dir)
    jobs = restore_backup(file, folder)
    num_unfinished = sum(not job.state.is_final for job in jobs)
    typer.echo(f"{folder} has {len(jobs)} job{'s' * (len(jobs) != 1)} again, {num_unfinished} unfinished")
    where = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir is not None else ""
    typer.echo(f"onbeat up{where} continues them, onbeat view {shlex.quote(str(folder))} only shows them")


def clean(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Remove these: logs, caches, leftovers, checkpoints (of all jobs that are over), or the id of such a "
            "job. Default: only show what there is.",
        ),
    ] = None,
    is_confirmed: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: AsJson = False,
    data_dir: DataDir = None,
) -> None:
    """Show what the data folder holds, with sizes, and remove what is named. Nothing of a running stack is removed."""
    from onbeat.local import clean as cleaning
    from onbeat.terminal.formatting import size

    folder = resolve_data_dir(data_dir)
    items = cleaning.list_content(folder)
    chosen = cleaning.choose(items, names) if names else items
    if as_json and not names:
        print_json([{"name": item.name or None, "bytes": item.num_bytes, "content": item.meaning} for item in items])
        return
    print_table(
        ["name", "size", "content"], [(item.name or "-", size(item.num_bytes), item.meaning) for item in chosen]
    )
    if not names:
        typer.echo(f"in {folder}; onbeat clean NAME... removes what has a name, - stays")
        return
    if not is_confirmed and not (sys.stdin.isatty() and typer.confirm("remove this for good?")):
        raise ValueError("nothing was removed; --yes removes it without a question")
    removed = cleaning.clean(folder, names)
    typer.echo(f"removed {size(sum(item.num_bytes for item in chosen))}: {len(removed)} of {len(items)} entries")
