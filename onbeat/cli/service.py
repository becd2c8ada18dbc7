"""Programs of the services, in processes of their own, as this one never imports torch; `onbeat model`, `replay`."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from typing import Annotated

import typer

from onbeat.cli.options import App, DataDir, JobId
from onbeat.process.children import command_of, last_words
from onbeat.process.extras import require_extra
from onbeat.process.stacks import resolve_data_dir, running_stack

app = App("Manage models on this machine.")

DEADLINE_S = 300.0


def run_service(module: str, arguments: Sequence[str], given: str, deadline_s: float | None = None) -> str:
    """Run a module of a service with a text as its standard input, and return what it prints.

    Raises ValueError if it prints nothing or takes longer than DEADLINE_S. With a `deadline_s`, what it has printed
    until then counts.
    """
    limit_s = DEADLINE_S if deadline_s is None else deadline_s
    try:
        child = subprocess.run(
            command_of(module, *arguments), input=given, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        if error.stdout and deadline_s is not None:
            return error.stdout.decode()  # bytes, despite `text`
        text = f"{module} took longer than {limit_s:.0f} s; try again when this machine is less busy"
        raise ValueError(text) from error
    if not child.stdout:
        raise ValueError(last_words(child.stderr) or f"{module} failed")
    return child.stdout


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="A bundled model, such as smollm2-135m-instruct.", show_default=False)],
) -> None:
    """Convert a bundled model ahead of the first job that uses it, and print its folder."""
    require_extra("trainer", user="a model of the trainer")
    raise typer.Exit(subprocess.call(command_of("services.trainer.model.bundled", name)))


def replay(
    job_id: JobId,
    iteration: Annotated[int, typer.Option(min=0, help="Number of a committed iteration.")],
    device: Annotated[str, typer.Option(help="Device to compute on: auto, cpu, cuda or npu.")] = "auto",
    cores: Annotated[
        str, typer.Option(metavar="LIST", help="CPU cores to use. For equal bits, as many as the trainer had.")
    ] = "",
    data_dir: DataDir = None,
) -> None:
    """Replay an iteration from its stream, on a running stack. The exit code is 0 only if the weights agree bit for
    bit."""
    from onbeat.local.supervisor import inherited_environment

    require_extra("trainer", user="a replay")
    folder = resolve_data_dir(data_dir)
    stack = running_stack(folder)
    environment = dict(os.environ)
    if stack is not None:
        environment = inherited_environment() | {"ONBEAT_REDIS_URL": stack.redis_url}
    elif "ONBEAT_REDIS_URL" not in environment:
        remedy = f"start it with `onbeat up --data-dir {shlex.quote(str(folder))}`, or set ONBEAT_REDIS_URL"
        raise ValueError(f"no stack runs in {folder}, and a replay reads from one: {remedy}")
    environment |= {"ONBEAT_DATA_DIR": str(folder), "ONBEAT_DEVICE": device, "ONBEAT_CPU_CORES": cores}
    command = command_of("services.trainer.replay", job_id, str(iteration))
    raise typer.Exit(subprocess.call(command, env=environment))
