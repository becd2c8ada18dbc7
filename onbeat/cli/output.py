"""Printing for commands. Text of a job may come from its model, and hold control codes for the terminal."""

import typer


def say(text: str, *, is_error: bool = False) -> None:
    """Print lines, with their control characters escaped."""
    from onbeat.terminal.formatting import printable

    typer.echo("\n".join(map(printable, text.split("\n"))), err=is_error)
