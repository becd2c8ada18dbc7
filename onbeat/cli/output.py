"""Printing for commands. Text of a job may come from its model, and hold control codes for the terminal."""

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import typer

from onbeat.terminal.formatting import Column, fitted_table, hanging, printable, table_lines

if TYPE_CHECKING:
    from onbeat.contracts.records import Record

RecordT = TypeVar("RecordT", bound="Record")


def say(text: str, *, is_error: bool = False) -> None:
    """Print lines, with their control characters escaped; on a terminal, long ones are wrapped between words."""
    width = width_of(sys.stderr if is_error else sys.stdout)
    lines = map(printable, text.split("\n"))
    typer.echo("\n".join(part for line in lines for part in (hanging(line, width) if width else [line])), err=is_error)


def width_of(stream: TextIO) -> int:
    """Return the columns of a terminal; 0 of a pipe or a file, whose lines are for programs."""
    return shutil.get_terminal_size().columns if stream.isatty() else 0


def when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")


def print_json(value: Any) -> None:
    """Print records and other values in ASCII, so that no control code of a model's text reaches the terminal."""
    typer.echo(json.dumps(value, indent=2, default=lambda record: record.model_dump(mode="json")))


def print_records(
    records: "Sequence[RecordT]",
    as_json: bool,
    titles: Sequence[str | Column],
    row_of: Callable[[RecordT], Sequence[str]],
) -> None:
    """Print one row for each record, or all of them as JSON."""
    if as_json:
        print_json(records)
    else:
        print_table(titles, map(row_of, records))


def print_table(titles: Sequence[str | Column], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. `Column`s with a rank are left out on a narrow terminal, the one with the highest rank first."""
    columns = [Column(title) if isinstance(title, str) else title for title in titles]
    width, all_rows = width_of(sys.stdout), list(rows)
    typer.echo("\n".join(fitted_table(columns, all_rows, width) if width else table_lines(columns, all_rows)))
