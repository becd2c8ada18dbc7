"""Options that several commands share, and the broker that some of them lead to."""

import asyncio
import inspect
import os
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from onbeat.contracts.errors import OnbeatError
from onbeat.local.state import StackState, resolve_data_dir, running_stack, why_ended

if TYPE_CHECKING:
    from rich.console import Console

    from onbeat.client import AsyncClient

Answer = TypeVar("Answer")
Command = TypeVar("Command", bound=Callable[..., None])
Url = Annotated[
    str | None,
    typer.Option(
        envvar="ONBEAT_URL", help="URL of the broker. Default: the data folder's stack, else http://127.0.0.1:8800."
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="ONBEAT_API_KEY",
        help="API key. Prefer ONBEAT_API_KEY: other users of this machine can see command lines.",
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
    typer.Option(help="Folder of the local stack: Redis, checkpoints, logs. Default: ONBEAT_DATA_DIR, else ./.onbeat"),
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


@dataclass(frozen=True)
class Broker:
    """The broker that a command asks: that of --url, else of the data folder's stack, else of the default address."""

    url: str | None
    api_key: str | None
    data_dir: Path | None  # as given; ONBEAT_DATA_DIR, which services have too, may have no stack

    @property
    def options(self) -> str:
        """The options that lead another command to this broker; it has the environment, too."""
        given = {"--url": self.url if self.url != os.environ.get("ONBEAT_URL") else None, "--data-dir": self.data_dir}
        return "".join(f" {name} {shlex.quote(str(value))}" for name, value in given.items() if value)

    def find_stack(self) -> StackState | None:
        """Return the running stack of the data folder, unless another broker is named."""
        return None if self.url else running_stack(resolve_data_dir(self.data_dir))

    def ask(self, question: Callable[["AsyncClient"], Awaitable[Answer]]) -> Answer:
        """Put a question to the broker, and return its answer. Raise OnbeatError if no stack runs in a given folder.

        The client trusts the authority in ONBEAT_CA_FILE, which `onbeat --ca-file` sets for the command that follows.
        """
        from onbeat.client import DEFAULT_URL, AsyncClient, BrokerUnreachable

        folder, stack = resolve_data_dir(self.data_dir), self.find_stack()
        if self.data_dir and not self.url and stack is None:
            given = shlex.quote(str(self.data_dir))
            remedy = f"start one with `onbeat up --data-dir {given}`, or name a broker with --url"
            raise OnbeatError(why_ended(folder) or f"no stack runs in {folder}; {remedy}")
        url = self.url or (stack.url if stack else DEFAULT_URL)

        async def call() -> Answer:
            async with AsyncClient(url, self.api_key, ca_file=os.environ.get("ONBEAT_CA_FILE")) as client:
                return await question(client)

        try:
            return asyncio.run(call())
        except BrokerUnreachable as error:
            if not self.url and (reason := why_ended(folder)):
                error.add_note(reason)
            raise


class App(typer.Typer):
    """A group of commands. One with the parameter `broker` has --url, --api-key and --data-dir in its place."""

    def __init__(self, help: str, **settings: Any) -> None:
        super().__init__(help=help, no_args_is_help=True, **settings)
        self.callback()(lambda: None)  # a single command without a callback would take the place of its group

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Command], Command]:
        register = super().command(*args, **kwargs)

        def add(command: Command) -> Command:
            register(with_broker(command) if "broker" in inspect.signature(command).parameters else command)
            return command

        return add


def with_broker(command: Callable[..., None]) -> Callable[..., None]:
    options = {"url": Url, "api_key": ApiKey, "data_dir": DataDir}

    @wraps(command)
    def run(**given: Any) -> None:
        command(broker=Broker(**{name: given.pop(name) for name in options}), **given)

    signature = inspect.signature(command)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name != "broker"]
    for name, kind in options.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def make_console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False)
