"""`onbeat replay`: run a committed iteration again from its record and compare the bits."""

import os
import shlex
import subprocess
import sys
from typing import Annotated

import typer

from onbeat.cli.options import DataDir, JobId


def replay(
    job_id: JobId,
    iteration: Annotated[int, typer.Option(min=0, help="Number of a committed iteration.")],
    device: Annotated[str, typer.Option(help="Device to compute on: auto, cpu, cuda or npu.")] = "auto",
    cores: Annotated[
        str, typer.Option(metavar="LIST", help="CPU cores to use. For equal bits, as many as the trainer had.")
    ] = "",
    data_dir: DataDir = None,
) -> None:
    """Replay an iteration from its stream. The exit code is 0 only if the weights agree bit for bit."""
    from onbeat.local.state import resolve_data_dir, running_stack
    from onbeat.local.supervisor import inherited_environment

    folder = resolve_data_dir(data_dir)
    stack = running_stack(folder)
    environment = dict(os.environ)
    if stack is not None:
        environment = inherited_environment() | {"ONBEAT_REDIS_URL": stack.redis_url}
    elif "ONBEAT_REDIS_URL" not in environment:
        remedy = f"start it with `onbeat up --data-dir {shlex.quote(str(folder))}`, or set ONBEAT_REDIS_URL"
        raise ValueError(f"no stack runs in {folder}: {remedy}")
    environment |= {"ONBEAT_DATA_DIR": str(folder), "ONBEAT_DEVICE": device, "ONBEAT_CPU_CORES": cores}
    # The replay runs in its own process, because this one never imports torch.
    command = [sys.executable, "-P", "-m", "services.trainer.replay", job_id, str(iteration)]
    raise typer.Exit(subprocess.call(command, env=environment))
