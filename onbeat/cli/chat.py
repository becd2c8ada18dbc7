"""`onbeat chat JOB`: talk to the policy of a running job."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onbeat.cli import output
from onbeat.cli.options import Broker, JobId
from onbeat.contracts.errors import OnbeatError
from onbeat.terminal.formatting import clip

if TYPE_CHECKING:
    from onbeat.client import AsyncClient

ANSWER_S = 330.0  # longer than the broker's own time limit, ONBEAT_CHAT_ANSWER_S (300)


def chat(
    broker: Broker,
    job_id: JobId,
    message: Annotated[
        str | None, typer.Argument(metavar="[MESSAGE]", help="Send this message, print the answer and exit.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, max=2.0, help="Sampling temperature; 0 takes the likeliest token.")
    ] = 1.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens. Default: as in training.")
    ] = None,
) -> None:
    """Talk to the policy of a running job. Without MESSAGE, read one message per line until Ctrl-D."""
    options: dict[str, Any] = {"model": job_id, "temperature": temperature}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens

    def say(messages: list[dict[str, str]]) -> str:
        return broker.change(lambda client: answer(client, options | {"messages": messages}))

    if message is not None:
        typer.echo(say([{"role": "user", "content": message}]))
    else:
        converse(say)


def converse(say: Callable[[list[dict[str, str]]], str]) -> None:
    """Read messages from standard input, and keep the conversation. A refused message is left out of it; if the
    input is no terminal, the exit code is then 1.

    No event loop runs while this waits for a line: a thread of the loop that reads input would outlive Ctrl-C.
    """
    messages: list[dict[str, str]] = []
    is_complete = True
    for line in read_lines():
        asked = {"role": "user", "content": line}
        try:
            text = say([*messages, asked])
        except OnbeatError as error:
            output.say(f"error: {error}", is_error=True)
            is_complete = False
            continue
        typer.echo(text)
        messages += [asked, {"role": "assistant", "content": text}]
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
