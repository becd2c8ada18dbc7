"""`onbeat chat JOB`: talk to the policy of a running job, or to the model that a job has left."""

import asyncio
import json
import shlex
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onbeat.cli import output
from onbeat.cli.options import Broker, Engine
from onbeat.contracts.errors import ApiError, OnbeatError, UnnamedBroker
from onbeat.process.brokers import find_broker, refuse_change
from onbeat.process.stacks import resolve_data_dir
from onbeat.terminal.formatting import clip

if TYPE_CHECKING:
    from onbeat.client import AsyncClient
    from onbeat.contracts.records import JobRecord
    from onbeat.local.chat_engine import ChatEngine, EngineOptions
    from onbeat.local.checkpoints import Checkpoint

Ask = Callable[[Callable[["AsyncClient"], Awaitable[Any]]], Any]

SERVE_PORT = 8801  # the broker has 8800
ANSWER_S = 330.0  # longer than the broker's own time limit, ONBEAT_CHAT_ANSWER_S (300)


@dataclass
class Partner:
    """A model that is talked to, with its side of the conversation. `label`: stands before its answers."""

    model: str
    ask: Ask
    options: dict[str, Any]
    label: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str) -> str:
        """Send a message and return the answer. Both are kept, unless the message is refused."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = self.options | {"model": self.model, "messages": messages}
        reply = str(self.ask(lambda client: answer(client, body)))
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return self.label + reply


def chat(
    broker: Broker,
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="Id of a job, or a folder with a model in Hugging Face layout, such as a checkpoint.",
            show_default=False,
        ),
    ],
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="Send this message, print the answer and exit.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0 takes the likeliest token.")
    ] = 1.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens. Default: as in training.")
    ] = None,
    is_compared: Annotated[
        bool, typer.Option("--compare", help="Let the model before training answer first, then the one after it.")
    ] = False,
    is_served: Annotated[
        bool, typer.Option("--serve", help="Serve OpenAI's interface on this machine until Ctrl-C, and ask nothing.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of --serve. Default: 8801 if it is free.")
    ] = None,
    engine: Engine = "vllm",
) -> None:
    """Talk to the policy of a running job, or to the model of a finished one. Without MESSAGE, read one message per
    line until Ctrl-D.

    For a finished job, and for a folder, an engine is started on the checkpoint on this disk. It ends with the chat.
    """
    if port is not None and not is_served:
        raise ValueError("--port is the port of --serve; add that, or leave --port out")
    if message is not None and is_served:
        raise ValueError("--serve asks nothing; leave the message out")
    options: dict[str, Any] = {"temperature": temperature}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    checkpoint = find_checkpoint(broker, job)
    if checkpoint is None:
        if is_served or is_compared:
            remedy = "the broker itself has OpenAI's interface, at /v1/chat/completions" if is_served else "wait for it"
            raise OnbeatError(f"--serve and --compare need a job that is over, and {job} is not; {remedy}")
        return converse([Partner(job, broker.change, options)], message)
    with started_engine(broker, checkpoint, make_options(engine, is_compared, is_served, port)) as running:
        if is_served:
            serve_until_interrupted(running)
        else:
            converse(partners_of(running, options), message)


def converse(partners: "Sequence[Partner]", message: str | None) -> None:
    """Let all partners answer a message, or else each line of standard input. A refused message is left out of the
    conversation; if the input is no terminal, the exit code is then 1.

    No event loop runs while this waits for a line: a thread of the loop that reads input would outlive Ctrl-C.
    """
    if message is not None:
        for partner in partners:
            typer.echo(partner.say(message))
        return
    from onbeat.local.supervisor import StackFailed

    is_complete = True
    for line in read_lines():
        for partner in partners:
            try:
                typer.echo(partner.say(line))
            except StackFailed:  # the engine has ended
                raise
            except OnbeatError as error:
                output.say(f"error: {error}", is_error=True)
                is_complete = False
    if sys.stdin.isatty():
        typer.echo()  # the shell's prompt begins a line
    elif not is_complete:
        raise typer.Exit(1)


def read_lines() -> Iterator[str]:
    """Yield the lines of the input that are not empty."""
    with suppress(EOFError):
        while True:
            if line := input("> " if sys.stdin.isatty() else "").strip():
                yield line


async def answer(client: "AsyncClient", body: dict[str, Any]) -> str:
    from onbeat.client.transport import part_of

    answer = await client.request("POST", "/v1/chat/completions", json=body, timeout=ANSWER_S)
    return clip(str(part_of(answer, "choices")[0]["message"]["content"]), max_characters=1_000_000)


# ---- a job that is over, and folders ---------------------------------------------------------------------------------


def find_checkpoint(broker: Broker, target: str) -> "Checkpoint | None":
    """Return the checkpoint on this disk that a job or a folder leads to; None for a job that a broker serves.

    Raises OnbeatError, with what to do, when there is neither.
    """
    from onbeat.client import BrokerUnreachable
    from onbeat.local.checkpoints import is_model, newest_checkpoint, read_checkpoint

    folder = Path(target).expanduser()
    if is_model(folder):
        return read_checkpoint(folder.resolve())
    if "/" in target:
        raise OnbeatError(f"{folder} is no folder with a model: config.json and *.safetensors are to be in it")
    data_dir, place = resolve_data_dir(broker.data_dir), find_broker(broker.url, broker.data_dir)
    if place.is_read_only:
        if (checkpoint := newest_checkpoint(data_dir, target)) is not None:
            return checkpoint
        if place.is_recorded:
            absent = f"no job {target!r} with a checkpoint is in {data_dir}"
            raise OnbeatError(f"{absent}; `onbeat jobs list` shows the jobs there")
        try:
            refuse_change(place)
        except UnnamedBroker as error:
            raise UnnamedBroker(f"no job {target!r} has a checkpoint here, and {error}") from None
    try:
        job = broker.ask(lambda client: find_over(client, target))
    except (BrokerUnreachable, ApiError) as error:
        is_absent = isinstance(error, BrokerUnreachable) or error.status == 404
        if is_absent and (checkpoint := newest_checkpoint(data_dir, target)) is not None:
            return checkpoint
        raise
    return None if job is None else checkpoint_of(job, data_dir)


async def find_over(client: "AsyncClient", target: str) -> "JobRecord | None":
    """Return a job that is over; None for one that chats. Raises ApiError when there is no such job."""
    from onbeat.client.transport import part_of

    served = part_of(await client.get("/v1/models"), "data")
    if any(target in (model["id"], model["name"]) for model in served):
        return None
    job = await client.jobs.get(target)
    return job if job.state.is_final else None


def checkpoint_of(job: "JobRecord", data_dir: Path) -> "Checkpoint":
    """Return the checkpoint of a job that is over, if it is on this machine. Raises OnbeatError."""
    from onbeat.local.checkpoints import is_model, newest_checkpoint, read_checkpoint

    if job.checkpoint is None:
        raise OnbeatError(f"job {job.id} is {job.state} and has no checkpoint, so there is no model to talk to")
    folder = Path(job.checkpoint)
    if is_model(folder) and (checkpoint := read_checkpoint(folder)).job_id == job.id:
        return checkpoint
    if (newest := newest_checkpoint(data_dir, job.id)) is not None:
        return newest
    raise OnbeatError(
        f"job {job.id} is {job.state}, and brokers serve running jobs only; its model is {folder} on the trainer's "
        "machine: copy that folder to this one, then `onbeat chat FOLDER`"
    )


# ---- an engine on this machine -------------------------------------------------------------------------------------


def make_options(engine: str, is_compared: bool, is_served: bool, port: int | None) -> "EngineOptions":
    """Return the options of an engine here. Raises ValueError or OnbeatError for what is not installed or not free."""
    from onbeat.local.chat_engine import EngineOptions
    from onbeat.local.redis_server import checked_port, free_port
    from onbeat.local.stack import check_engine_name
    from onbeat.process.extras import require_extra

    require_extra("rollout", user="an engine on this machine", install="local")
    check_engine_name(engine)
    if is_served:
        port = free_port(preferred=SERVE_PORT) if port is None else checked_port(port)
    return EngineOptions(engine, is_compared, port)


@contextmanager
def started_engine(broker: Broker, checkpoint: "Checkpoint", options: "EngineOptions") -> "Iterator[ChatEngine]":
    """Run an engine on the checkpoint. SIGTERM and a closed terminal end it, too."""
    from onbeat.local.chat_engine import chat_engine
    from onbeat.local.run import terminations_as_interrupts

    engines = "engines on the models before and after training" if options.has_before else "an engine"
    output.say(f"starting {engines} for {checkpoint.folder}, usually 20 to 60 s", is_error=True)
    if checkpoint.job is None:
        output.say("no job is recorded there: prompts are as the model's own chat template makes them", is_error=True)
    with (
        terminations_as_interrupts(),
        chat_engine(checkpoint, options, resolve_data_dir(broker.data_dir)) as running,
    ):
        yield running


def partners_of(running: "ChatEngine", options: dict[str, Any]) -> list[Partner]:
    """Return the models of an engine as partners, the one before training first."""
    from onbeat.client import AsyncClient, BrokerUnreachable

    def ask(question: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
        async def call() -> Any:
            async with AsyncClient(running.url) as client:
                return await question(client)

        try:
            return asyncio.run(call())
        except BrokerUnreachable:
            running.check()  # the engine may have ended, and its log says why
            raise

    after, *before = running.models
    if not before:
        return [Partner(after, ask, options)]
    return [Partner(before[0], ask, options, "before: "), Partner(after, ask, options, "after:  ")]


def serve_until_interrupted(running: "ChatEngine") -> None:
    """Say how to use the interface, and wait for Ctrl-C. Raises OnbeatError when the engine ends by itself."""
    from onbeat.local.chat_engine import wait_for_end

    names = " and ".join(running.models)
    typer.echo(f"serving {names} at {running.url}/v1, without keys, to this machine; Ctrl-C ends it")
    body = {"model": running.models[0], "messages": [{"role": "user", "content": "Hello"}]}
    header = "-H 'Content-Type: application/json'"
    typer.echo(f"curl {running.url}/v1/chat/completions {header} -d {shlex.quote(json.dumps(body))}")
    try:
        wait_for_end(running)
    except KeyboardInterrupt:
        typer.echo("ended")
