"""Options that several commands share, and the broker that some of them lead to."""

import asyncio
import inspect
import os
import shlex
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from onbeat.cli.output import say
from onbeat.process.brokers import NAMING, BrokerPlace, Source, describe_reading, find_broker, refuse_change
from onbeat.process.stacks import has_processes, wait_until, why_ended

if TYPE_CHECKING:
    from rich.console import Console

    from onbeat.client import AsyncClient

ENDING_S = 15.0  # records that another command had opened

Answer = TypeVar("Answer")
Command = TypeVar("Command", bound=Callable[..., None])
Url = Annotated[
    str | None,
    typer.Option(help="URL of the broker. Default: ONBEAT_URL, else the stack of the data folder, else its records."),
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
    """The broker that a command asks, by the rule of `onbeat.process.brokers`."""

    url: str | None
    api_key: str | None
    data_dir: Path | None  # as given

    @property
    def options(self) -> str:
        """The options that lead another command to this broker; it has the environment, too."""
        given = {"--url": self.url, "--data-dir": self.data_dir}
        return "".join(f" {name} {shlex.quote(str(value))}" for name, value in given.items() if value)

    def ask(self, question: Callable[["AsyncClient"], Awaitable[Answer]]) -> Answer:
        """Put a question to the broker that changes nothing, and return its answer. Records are opened for it.

        Raise OnbeatError for a given folder with neither a stack nor records.
        """
        from onbeat.client import BrokerUnreachable

        place = find_broker(self.url, self.data_dir)
        if reading := describe_reading(place):
            say(reading, is_error=True)
        if place.source is Source.RECORDS:
            return self._ask_records(place, question)
        try:
            return self._put(place, question)
        except BrokerUnreachable:
            # Another command had opened the records, and has ended.
            is_over = place.source is Source.STACK and place.is_read_only
            if is_over and wait_until(lambda: not has_processes(place.folder), ENDING_S):
                return self._ask_records(place, question)
            raise

    def change(self, change: Callable[["AsyncClient"], Awaitable[Answer]]) -> Answer:
        """Have the broker change something, and return its answer. Raise UnnamedBroker where it may only be read."""
        place = find_broker(self.url, self.data_dir)
        refuse_change(place)
        return self._put(place, change)

    def _ask_records(self, place: BrokerPlace, question: Callable[["AsyncClient"], Awaitable[Answer]]) -> Answer:
        from onbeat.process.records import OpenRecords

        with closing(OpenRecords(place.folder)) as records:
            return self._put(replace(place, url=records.url), question)

    def _put(self, place: BrokerPlace, question: Callable[["AsyncClient"], Awaitable[Answer]]) -> Answer:
        """Put a question to the broker at an address. The key of the environment is not sent to the default address.

        The client trusts the authority in ONBEAT_CA_FILE, which `onbeat --ca-file` sets for the command that follows.
        """
        from onbeat.client import ApiError, AsyncClient, BrokerUnreachable

        is_default, environment_key = place.source is Source.DEFAULT, os.environ.get("ONBEAT_API_KEY")
        is_held_back = is_default and self.api_key is not None and self.api_key == environment_key
        api_key = None if is_held_back else self.api_key

        async def call() -> Answer:
            async with AsyncClient(place, api_key, ca_file=os.environ.get("ONBEAT_CA_FILE")) as client:
                return await question(client)

        try:
            return asyncio.run(call())
        except BrokerUnreachable as error:
            if place.source is not Source.NAMED and (reason := why_ended(place.folder)):
                error.add_note(reason)
            raise
        except ApiError as error:
            if is_held_back and error.status == HTTPStatus.UNAUTHORIZED:
                error.add_note(f"ONBEAT_API_KEY is sent only to an address that was named:\n  {NAMING}")
            raise


class App(typer.Typer):
    """A group of commands. One with the parameter `broker` has --url, --api-key and --data-dir in its place."""

    def __init__(self, help: str, **settings: Any) -> None:
        super().__init__(help=help, no_args_is_help=True, **settings)
        self.callback()(lambda: None)  # a single command without a callback would take the place of its group

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Command], Command]:
        def add(command: Command) -> Command:
            register = super(App, self).command(*args, **{"help": help_of(command)} | kwargs)
            register(with_broker(command) if "broker" in inspect.signature(command).parameters else command)
            return command

        return add


def help_of(command: Command) -> str:
    """Return the docstring with one line for each paragraph: terminals of any width wrap it."""
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)


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
