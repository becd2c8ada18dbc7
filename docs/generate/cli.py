"""docs/reference/cli.md from the `onbeat` command itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from docs.generate.markdown import code, generated_note, join, sentence, table
from onbeat.cli import app

# Typer's commands and parameters are of its own copy of Click, whose classes it does not export.
Command = Any
Parameter = Any

INTRODUCTION = """# The command line

`onbeat COMMAND --help` shows the same in a terminal. The exit code is 0 for success, 1 for a failure, 2 for wrong usage
or a wrong job, and 130 after an interruption."""

IN_A_TERMINAL = Path(__file__).with_name("in_a_terminal.txt")  # output of the commands, with links as of docs/reference

KINDS = {int: "number", float: "number", Path: "path"}


def page() -> str:
    root = typer.main.get_command(app)
    parts = [
        generated_note("onbeat/cli/ and docs/generate/in_a_terminal.txt"),
        INTRODUCTION,
        IN_A_TERMINAL.read_text().strip(),
    ]
    for path, command in commands(root, ("onbeat",)):
        parts += [f"## `{' '.join(path)}`", help_of(command), usage(path, command), parameters(command)]
    return join(*parts)


def commands(command: Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Command]]:
    """Depth first, in the order of their registration."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*path, name))


def help_of(command: Command) -> str:
    return "\n\n".join(sentence(part) for part in (command.help or "").split("\n\n"))


def usage(path: tuple[str, ...], command: Command) -> str:
    inner = ["COMMAND"] if hasattr(command, "commands") else []
    arguments = [name_of(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
    return f"```text\n{' '.join((*path, '[OPTIONS]', *inner, *arguments))}\n```"


def name_of(argument: Parameter) -> str:
    """Return the name in capitals, such as `JOB`, in brackets where it may be left out."""
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def parameters(command: Command) -> str:
    context = command.context_class(command)
    rows = [row for parameter in command.get_params(context) if (row := row_of(parameter))]
    return table(["option", "value", "default", "meaning"], rows) if rows else ""


def row_of(parameter: Parameter) -> tuple[str, ...] | None:
    if parameter.name == "help" or getattr(parameter, "hidden", False):
        return None
    is_argument = parameter.param_type_name == "argument"
    names = [name_of(parameter)] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    meaning = sentence(parameter.help or "")
    if parameter.envvar:
        meaning += f" Or the variable `{parameter.envvar}`."
    return ", ".join(map(code, names)), value_of(parameter), default_of(parameter), meaning


def value_of(parameter: Parameter) -> str:
    if getattr(parameter, "is_flag", False):
        return ""
    annotation = parameter.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        return " or ".join(code(str(choice)) for choice in get_args(annotation))
    kind = parameter.metavar and code(parameter.metavar) if parameter.param_type_name == "option" else ""
    return (kind or KINDS.get(annotation, "text")) + (", repeatable" if parameter.multiple else "")


def default_of(parameter: Parameter) -> str:
    if parameter.required:
        return "needed"
    default = parameter.default
    return code(str(default)) if isinstance(default, str | int | float) and default not in (False, "") else ""
