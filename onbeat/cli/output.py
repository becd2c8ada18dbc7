"""Printing for commands. Text of a job may come from its model, and hold control codes for the terminal."""

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from onbeat.terminal.formatting import Column, printable, table_lines

if TYPE_CHECKING:
    from onbeat.contracts.records import Record

RecordT = TypeVar("RecordT", bound="Record")


def say(text: str, *, is_error: bool = False) -> None:
    """Print lines, with their control characters escaped."""
    typer.echo("\n".join(map(printable, text.split("\n"))), err=is_error)


def when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M:%S")


def print_json(value: Any) -> None:
    """Print records and other values in ASCII, so that no control code of a model's text reaches the terminal."""
    typer.echo(json.dumps(value, indent=2, default=lambda record: record.model_dump(mode="json")))


def print_records(
    records: "Sequence[RecordT]", as_json: bool, titles: Sequence[str], row_of: Callable[[RecordT], Sequence[str]]
) -> None:
    """Print one row for each record, or all of them as JSON."""
    if as_json:
        print_json(records)
    else:
        print_table(titles, map(row_of, records))


def print_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    typer.echo("\n".join(table_lines([Column(title) for title in titles], list(rows))))
