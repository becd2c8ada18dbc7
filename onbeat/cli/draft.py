"""`onbeat init` and `onbeat validate`: write a job file, and check it before it is submitted."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.options import AsJson, Broker, Job, Overrides
from onbeat.cli.output import print_json, say

if TYPE_CHECKING:
    from onbeat.client import AsyncClient
    from onbeat.contracts.records import Validation

NOT_ASKED = "no broker was asked about model, data and reward"

TEMPLATE = """\
# A job of Onbeat. It runs as it is: `onbeat run {name}`. All keys: docs/reference/job.md.
name = "{stem}"

[model]
path = "bundled:smollm2-135m-instruct"    # or a folder ("./my-model"), or a hub id ("org/name")

[data]
type = "reasoning_gym"
task = "chain_sum"
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 1, allow_negation = false }}
# Your own rows, one object a line, {{"prompt": "5 + 9 =", "answer": "14"}}:
# type = "jsonl"
# path = "questions.jsonl"    # beside this file

[reward]
name = "regex"                            # the last number in the response has to be the answer
options = {{ pattern = '(-?\\d+)' }}        # try it: onbeat reward try {name}

[rollout]
num_prompts_per_iteration = 8
num_samples_per_prompt = 8
max_response_tokens = 16

[optimizer]
learning_rate = 2e-5

[schedule]
num_iterations = 25

# Score other prompts now and then, without training on them.
# [evaluation]
# every_iterations = 10
# num_prompts = 32
# data = {{ type = "jsonl", path = "held_out.jsonl" }}
"""


def init(path: Annotated[Path, typer.Argument(help="The job file to write.")] = Path("job.toml")) -> None:
    """Write a job file to start from."""
    if path.suffix != ".toml":
        raise ValueError(f"{path}: the job is written in TOML; name a file that ends with .toml")
    name = "".join(character if character.isalnum() and character.isascii() else "-" for character in path.stem)
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(TEMPLATE.format(name=path.name, stem=name.strip("-") or "job"))
                file.flush()
            except OSError:
                path.unlink()  # the next try on a full disk finds no empty file
                raise
    except FileExistsError as error:
        raise ValueError(f"{path} is there already; name another file") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror or error}") from error
    given = shlex.quote(str(path))
    typer.echo(f"{path} is written; `onbeat validate {given}` checks it, `onbeat run {given}` trains")


def validate(broker: Broker, job: Job, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a job without creating it, here and, if an address was named or a stack runs in the data folder, there.

    A broker also checks the model, the reward and every row of the data. Files beside the job file are uploaded to it.
    --json prints how many rows are accepted, changed and refused, and why.
    """
    from onbeat.client import ApiError, UnnamedBroker
    from onbeat.client.datasets import take_local_files
    from onbeat.config import JobConfig, read_job_file

    fields, wrong = read_job_file(job, overrides or []), None
    try:
        JobConfig.from_file(job, overrides)
    except ValueError as error:
        wrong = error  # a broker may report further errors
    files = take_local_files(fields, job.parent)

    async def ask_broker(client: "AsyncClient") -> "tuple[str, Validation]":
        for file in files:
            await client.datasets.push(file)
        return client.base_url, await client.jobs.check(fields)

    try:
        address, validation = broker.change(ask_broker)
    except ApiError as error:
        if as_json:
            print_json({"is_accepted": False, "detail": error.detail, "errors": error.errors, "rows": error.rows})
            raise typer.Exit(1) from error
        raise
    except UnnamedBroker as reason:
        if wrong is not None:
            raise wrong from reason
        if as_json:
            print_json({"is_accepted": None, "notes": [f"{NOT_ASKED}: {reason}"], "rows": []})
        else:
            say(f"{job}: its keys and values are right. {NOT_ASKED.capitalize()}: {reason}")
        return
    if as_json:
        print_json({"is_accepted": True, **validation.model_dump(mode="json")})
        return
    for note in validation.notes:
        say(f"note: {note}")
    typer.echo(f"{job}: the broker at {address} would accept it")
