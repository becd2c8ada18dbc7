"""`onbeat jobs`: the commands that create, list, follow and control the jobs of a broker."""

import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onbeat.cli.options import App, AsJson, Broker, Job, JobId, Overrides, make_console
from onbeat.cli.output import print_json, print_records, print_table, when
from onbeat.contracts.errors import OnbeatError
from onbeat.terminal.formatting import Column, duration, number

if TYPE_CHECKING:
    from onbeat.client import AsyncClient
    from onbeat.contracts.records import EvaluationRecord, IterationRecord, JobRecord, Sample
    from onbeat.terminal.before_after import BeforeAfter

INTERRUPTED = 130

app = App("Submit, watch and control jobs.")


@app.command()
def create(
    broker: Broker,
    job: Job,
    overrides: Overrides = None,
    idempotency_key: Annotated[
        str | None, typer.Option(help="Repeat a call with the same key to get the same job.")
    ] = None,
    is_watched: Annotated[bool, typer.Option("--watch", help="Follow the job until it ends.")] = False,
) -> None:
    """Submit a job and print its id. Data files that it names relative to its own file are uploaded."""
    from onbeat.client.datasets import take_local_files
    from onbeat.config import read_job_file

    config = read_job_file(job, overrides or [])
    files = take_local_files(config, job.parent)

    async def submit(client: "AsyncClient") -> str:
        for file in files:
            await client.datasets.push(file)
            typer.echo(f"{file.source} is {file.path} of the broker", err=True)
        return (await client.jobs.create(config, idempotency_key)).id

    job_id = broker.change(submit)
    typer.echo(job_id)
    if is_watched:
        watch(broker, job_id)


@app.command()
def fork(
    broker: Broker,
    job_id: JobId,
    iteration: Annotated[
        int,
        typer.Option("--from", min=1, help="Start from the checkpoint that the job wrote after this many iterations."),
    ],
    overrides: Overrides = None,
    is_watched: Annotated[bool, typer.Option("--watch", help="Follow the new job until it ends.")] = False,
) -> None:
    """Submit a job that starts from a checkpoint of another one. `--set` changes its settings."""
    new_id = broker.change(lambda client: client.jobs.fork(job_id, iteration, overrides or [])).id
    typer.echo(new_id)
    if is_watched:
        watch(broker, new_id)


@app.command("list")
def list_jobs(
    broker: Broker,
    state: Annotated[str | None, typer.Option(help="Only jobs in this state, such as RUNNING.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="Largest number of jobs.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List the jobs, newest first, with the reward of their newest iteration."""
    from onbeat.client.active import newest_iteration

    async def look(client: "AsyncClient") -> list[tuple["JobRecord", "IterationRecord | None"]]:
        jobs = await client.jobs.list(state, limit)
        return [(job, None if as_json else await newest_iteration(client, job)) for job in jobs]

    jobs_and_newest = broker.ask(look)
    if as_json:
        print_json([job for job, _ in jobs_and_newest])
        return
    rows = []
    for job, newest in jobs_and_newest:
        reward = number(newest.reward_mean if newest else None, ".3f")
        ran = duration((job.finished_at or time.time()) - job.started_at) if job.started_at is not None else "-"
        iterations = f"{job.next_iteration}/{job.num_iterations}"
        rows.append((job.id, job.name, job.pool, job.state.value, iterations, reward, ran, when(job.created_at)))
    print_table(
        ["id", "name", Column("pool", 2), "state", "iterations", "reward", "time", Column("created", 1)],
        rows,
    )


@app.command()
def get(broker: Broker, job_id: JobId) -> None:
    """Print one job as JSON."""
    print_json(broker.ask(lambda client: client.jobs.get(job_id)))


@app.command()
def watch(broker: Broker, job_id: JobId) -> None:
    """Follow a job until it ends. The exit code is 0 only if it SUCCEEDED. Ctrl-C leaves the job running."""
    from onbeat.contracts.states import JobState
    from onbeat.local.run import terminations_as_interrupts
    from onbeat.terminal.follow import follow
    from onbeat.terminal.summary import print_summary

    console = make_console()

    async def show(client: "AsyncClient") -> JobState:
        await check_that_it_moves(client, job_id)
        progress = await follow(client, job_id, console)
        await print_summary(client, progress, console)
        return progress.job.state

    with terminations_as_interrupts():
        try:
            state = broker.ask(show)
        except KeyboardInterrupt:
            typer.echo("not watching any more; the job goes on")
            typer.echo(f"  onbeat jobs watch {job_id}{broker.options}   comes back to it")
            typer.echo(f"  onbeat jobs cancel {job_id}{broker.options}  ends it")
            raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(0 if state == JobState.SUCCEEDED else 1)


async def check_that_it_moves(client: "AsyncClient", job_id: str) -> None:
    """Raise OnbeatError for an unfinished job in records: watching it would never end."""
    if client.place.is_recorded and not (job := await client.jobs.get(job_id)).state.is_final:
        done = f"{job.next_iteration} of {job.num_iterations} iterations"
        start = f"`onbeat up{client.place.option}` starts a stack for it"
        raise OnbeatError(f"job {job_id} is {job.state} after {done}, and nothing runs here: {start}")


@app.command()
def cancel(broker: Broker, job_id: JobId) -> None:
    """Cancel a job. Its committed iterations are kept."""
    print_state(broker.change(lambda client: client.jobs.cancel(job_id)))


@app.command()
def pause(broker: Broker, job_id: JobId) -> None:
    """Pause a job until it is resumed."""
    print_state(broker.change(lambda client: client.jobs.pause(job_id)))


@app.command()
def resume(
    broker: Broker,
    job_id: JobId,
    num_iterations: Annotated[
        int | None,
        typer.Option("--iterations", min=1, help="New total, for a job that SUCCEEDED; must be larger than before."),
    ] = None,
) -> None:
    """Resume a job that is paused, FAILED or CANCELLED, or one that SUCCEEDED, for more iterations."""
    print_state(broker.change(lambda client: client.jobs.resume(job_id, num_iterations)))


@app.command()
def delete(broker: Broker, job_id: JobId) -> None:
    """Delete a job that has ended. Its checkpoints stay on the trainer's disk."""

    async def remove(client: "AsyncClient") -> str | None:
        checkpoint = (await client.jobs.get(job_id)).checkpoint
        await client.jobs.delete(job_id)
        return checkpoint

    checkpoint = broker.change(remove)
    typer.echo(f"{job_id} deleted" + (f"; its newest checkpoint is still at {checkpoint}" if checkpoint else ""))


def print_state(job: "JobRecord") -> None:
    typer.echo(f"{job.id} {job.state.value}")


@app.command()
def samples(
    broker: Broker,
    job_id: JobId,
    iteration: Annotated[int | None, typer.Option(min=0, help="Iteration to show. Default: the newest.")] = None,
    evaluation: Annotated[int | None, typer.Option(min=0, help="Show responses of this evaluation instead.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Largest number of responses.")] = 10,
    is_truncated: Annotated[
        bool, typer.Option("--truncated", help="Show only responses that were cut at the limit of tokens.")
    ] = False,
    is_wrong: Annotated[
        bool, typer.Option("--wrong", help="Show only responses with a reward below `solved_at` of the job.")
    ] = False,
    search: Annotated[
        str, typer.Option(metavar="TEXT", help="Show only responses with this text in them or in their prompt.")
    ] = "",
    is_decoded: Annotated[
        bool, typer.Option("--decoded", help="Show prompts as the model saw them, with special tokens.")
    ] = False,
    is_before_after: Annotated[
        bool,
        typer.Option("--before-after", help="Show answers to the same held-out prompts before and after training."),
    ] = False,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Show responses to the prompts of one of several sources.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show responses with their rewards."""
    from onbeat.terminal.summary import print_examples

    choice: dict[str, Any] = {"truncated": is_truncated, "wrong": is_wrong, "search": search, "source": source}
    if evaluation is not None and any(choice.values()):
        raise ValueError(
            "--truncated, --wrong, --search and --source are for iterations; leave them or --evaluation out"
        )
    if is_before_after:
        if iteration is not None or evaluation is not None or is_decoded or any(choice.values()):
            raise ValueError("--before-after shows the first and the last answers; leave out the other options")
        show_before_after(broker, job_id, limit, as_json)
        return

    def ask_for(client: "AsyncClient") -> "Awaitable[Sequence[Sample]]":
        if evaluation is not None:
            return client.jobs.evaluation_samples(job_id, evaluation)
        return client.jobs.samples(job_id, iteration=iteration, limit=limit, **choice)

    samples = broker.ask(ask_for)[:limit]
    if as_json:
        print_json(samples)
    elif not samples:
        typer.echo("no such samples" if any(choice.values()) else "no samples yet")
    else:
        kind = "iteration" if evaluation is None else "evaluation"
        print_examples(make_console(), f"{kind} {samples[0].iteration}", samples, is_decoded=is_decoded)


def show_before_after(broker: Broker, job_id: str, limit: int, as_json: bool) -> None:
    from onbeat.terminal.before_after import print_before_after, read_before_after

    async def ask_for(client: "AsyncClient") -> "BeforeAfter | None":
        return await read_before_after(client, await client.jobs.get(job_id))

    before_after = broker.ask(ask_for)
    if as_json:
        print_json(before_after and before_after.as_json())
    elif before_after is None:
        typer.echo("no samples yet: the first evaluation, or two iterations, must be over")
    else:
        print_before_after(make_console(), before_after, limit)


@app.command()
def evaluations(broker: Broker, job_id: JobId, as_json: AsJson = False) -> None:
    """Show the scores on the held-out set."""

    def row(record: "EvaluationRecord") -> Sequence[str]:
        return (
            str(record.evaluation),
            number(record.policy_version, "d"),
            record.state.value,
            number(record.reward_mean, ".3f"),
            number(record.pass_at_k, ".0%"),
            number(record.response_tokens_mean, ".1f"),
            number(record.truncated_frac, ".0%"),
            f"{record.num_failed_groups}/{record.num_groups}",
        )

    evaluations = broker.ask(lambda client: client.jobs.evaluations(job_id))
    columns = ["evaluation", "version", "state", "reward", "solved", "tokens", "truncated", "failed"]
    print_records(evaluations, as_json, columns, row)


@app.command()
def report(
    broker: Broker,
    job_id: JobId,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write. Default: the terminal.")] = None,
) -> None:
    """Print the numbers of every iteration and their totals as JSON."""
    from onbeat.terminal.report import build_report, check_report_path, write_report

    if output is not None:
        check_report_path(output)
    built = broker.ask(lambda client: build_report(client, job_id))
    if output is None:
        print_json(built)
    else:
        write_report(output, built)
