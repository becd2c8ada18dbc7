"""`onbeat model`: models on this machine."""

import subprocess
import sys
from typing import Annotated

import typer

from onbeat.cli.options import App

app = App("Manage models on this machine.")


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help="A bundled model, such as smollm2-135m-instruct.", show_default=False)],
) -> None:
    """Convert a bundled model ahead of the first job that uses it, and print its folder."""
    # The conversion runs in its own process, because this one never imports torch.
    command = [sys.executable, "-P", "-m", "services.trainer.model.bundled", name]
    raise typer.Exit(subprocess.call(command))
