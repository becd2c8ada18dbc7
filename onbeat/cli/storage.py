"""`onbeat backup`, `restore` and `clean`: all data of a stack."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from onbeat.cli.options import AsJson, DataDir
from onbeat.cli.output import print_json, print_table
from onbeat.contracts.states import JobState
from onbeat.process.stacks import resolve_data_dir

Compose = Annotated[
    bool, typer.Option("--compose", help="The stack of `docker compose` in this folder, instead of a local one.")
]


def backup(
    file: Annotated[Path, typer.Argument(help="The file to write, a tar. It must not exist.", show_default=False)],
    is_compose: Compose = False,
    data_dir: DataDir = None,
) -> None:
    """Write the jobs of a stack into one file: ledger, checkpoints, data files. The stack may run on."""
    from onbeat.local.backup import write_backup
    from onbeat.local.compose import write_compose_backup
    from onbeat.terminal.formatting import size

    if is_compose:
        refuse_data_dir(data_dir)
        num_jobs = len(write_compose_backup(file))
    else:
        num_jobs = len(write_backup(resolve_data_dir(data_dir), file).jobs)
    typer.echo(f"{file} is written: {num_jobs} job{'s' * (num_jobs != 1)}, {size(file.stat().st_size)}")
    name = shlex.quote(str(file))
    typer.echo(f"bring it back: onbeat restore {name} --data-dir FOLDER, or onbeat restore {name} --compose")


def restore(
    file: Annotated[Path, typer.Argument(help="A file that `onbeat backup` wrote.", show_default=False)],
    is_compose: Compose = False,
    is_replacing: Annotated[
        bool, typer.Option("--replace", help="With --compose: remove what the volumes of the stack hold.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Make a data folder from a backup, which must be new or empty, or fill the volumes of a stopped stack."""
    from onbeat.local.compose import restore_compose_backup
    from onbeat.local.restore import restore_backup

    if is_compose:
        refuse_data_dir(data_dir)
        records = restore_compose_backup(file, is_replacing)
        states = [JobState(record["state"]) for record in records]
        place, start = "compose's stack", "docker compose up -d --wait continues them"
    elif is_replacing:
        raise ValueError("--replace is for --compose; a data folder is never overwritten, so name a new one")
    else:
        folder = resolve_data_dir(data_dir)
        states = [job.state for job in restore_backup(file, folder)]
        where = f" --data-dir {shlex.quote(str(data_dir))}" if data_dir is not None else ""
        place = str(folder)
        start = f"onbeat up{where} continues them, onbeat view {shlex.quote(str(folder))} only shows them"
    num_unfinished = sum(not state.is_final for state in states)
    typer.echo(f"{place} has {len(states)} job{'s' * (len(states) != 1)} again, {num_unfinished} unfinished")
    typer.echo(start)


def refuse_data_dir(data_dir: Path | None) -> None:
    if data_dir is not None:
        raise ValueError("--data-dir names a local stack, and --compose another one; leave one of them out")


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
