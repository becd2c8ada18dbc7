"""The `onbeat` command. Modules import what loads slowly inside the commands: `onbeat --help` stays instant."""

import os
import sys
from typing import Annotated

import typer

from onbeat.cli import chat, data, draft, export, jobs, keys, look, plan, reward, service, stack, storage, sweep
from onbeat.cli.options import App, CaFile
from onbeat.cli.output import say
from onbeat.contracts.errors import ApiError, OnbeatError, UnnamedBroker

MAX_NAME = 200  # characters of a path that an error shows

app = App(
    name="onbeat",
    help="Post-train language models with reinforcement learning, one policy version per iteration.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("init")(draft.init)
app.command("validate")(draft.validate)
app.command("run")(stack.run)
app.command("up")(stack.up)
app.command("down")(stack.down)
app.command("replay")(service.replay)
app.add_typer(jobs.app, name="jobs")
app.command("sweep")(sweep.sweep)
app.add_typer(data.app, name="data")
app.command("audit")(look.audit)
app.command("doctor")(look.doctor)
app.command("chat")(chat.chat)
app.command("view")(stack.view)
app.command("report")(look.report)
app.command("export")(export.export)
app.command("logs")(look.logs)
app.command("backup")(storage.backup)
app.command("restore")(storage.restore)
app.command("clean")(storage.clean)
app.command("top")(look.top)
app.add_typer(keys.app, name="keys")
app.add_typer(service.app, name="model")
app.add_typer(plan.app, name="plan")
app.add_typer(reward.app, name="reward")


def show_version(is_wanted: bool) -> None:
    if is_wanted:
        from onbeat import __version__

        typer.echo(f"onbeat {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ca_file: CaFile = None,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    if ca_file is not None:
        os.environ["ONBEAT_CA_FILE"] = str(ca_file)  # `Broker.ask` reads it


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 wrong usage or an invalid job, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a response may have characters that this terminal cannot show
    try:
        app()
    except OnbeatError as error:
        is_wrong = isinstance(error, UnnamedBroker) or (isinstance(error, ApiError) and error.status == 422)
        fail("\n".join([str(error), *getattr(error, "__notes__", ())]), 2 if is_wrong else 1)
    except ValueError as error:
        fail(str(error), 2)
    except OSError as error:  # such as an unreadable file or a full disk
        fail(describe_os_error(error), 1)


def describe_os_error(error: OSError) -> str:
    """Return a sentence that names the file, the start of it if it is very long."""
    if error.filename is None or error.strerror is None:
        return str(error)
    name = str(error.filename)
    return f"{name if len(name) <= MAX_NAME else name[:MAX_NAME] + '...'} cannot be used: {error.strerror}"


def fail(message: str, exit_code: int) -> None:
    say(f"error: {message}", is_error=True)
    sys.exit(exit_code)
