"""Options that several commands share."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from onbeat.client import AsyncClient

Answer = TypeVar("Answer")
Url = Annotated[
    str | None,
    typer.Option(
        envvar="ONBEAT_URL", help="URL of the broker. Default: the data folder's stack, else http://127.0.0.1:8800."
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="ONBEAT_API_KEY", help="API key. Other users of the machine can see options, but not the variable."
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        envvar="ONBEAT_CA_FILE", help="PEM file of the authority of the broker's certificate. Default: the system's."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        envvar="ONBEAT_DATA_DIR", help="Folder of the local stack: Redis, checkpoints, logs. Default: ./.onbeat"
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job: --set schedule.num_iterations=5"),
]
Job = Annotated[Path, typer.Argument(help="A job file, TOML or JSON; see examples/.", show_default=False)]
JobId = Annotated[
    str, typer.Argument(metavar="JOB", help="Id of a job, as `onbeat jobs list` shows it.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NumRollouts = Annotated[int, typer.Option("--rollouts", min=1, max=64, help="Number of rollouts.")]
Engine = Annotated[str, typer.Option(help="Inference engine: vllm, transformers, or the name of an installed one.")]
RolloutCores = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="CPU cores of all rollouts, such as 0-3,6. Default: the first half, or all if there are fewer than four.",
    ),
]
TrainerCores = Annotated[
    str | None,
    typer.Option(
        metavar="LIST", help="CPU cores of the trainer. Default: the rest, or all if there are fewer than four."
    ),
]


def connect(url: str | None, api_key: str | None, data_dir: Path | None = None) -> "AsyncClient":
    """Return a client for --url, else for the stack of the data folder, else for the default address.

    It trusts the authority in ONBEAT_CA_FILE, which `onbeat --ca-file` sets for the command that follows.
    """
    from onbeat.client import DEFAULT_URL, AsyncClient
    from onbeat.local.state import resolve_data_dir, running_stack

    if not url:
        stack = running_stack(resolve_data_dir(data_dir))
        url = stack.url if stack else DEFAULT_URL
    return AsyncClient(url, api_key, ca_file=os.environ.get("ONBEAT_CA_FILE"))


def ask(
    url: str | None, api_key: str | None, data_dir: Path | None, question: Callable[["AsyncClient"], Awaitable[Answer]]
) -> Answer:
    """Put a question to the broker that `connect` finds, and return its answer."""

    from onbeat.client import BrokerUnreachable

    async def call() -> Answer:
        async with connect(url, api_key, data_dir) as client:
            return await question(client)

    try:
        return asyncio.run(call())
    except BrokerUnreachable as error:
        if not url:
            from onbeat.local.daemon import why_ended
            from onbeat.local.state import resolve_data_dir

            if reason := why_ended(resolve_data_dir(data_dir)):
                error.add_note(reason)
        raise


def make_console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False)
