"""`onbeat sweep`: one job with several values and seeds, as jobs of a broker."""

from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.jobs import INTERRUPTED
from onbeat.cli.options import AsJson, Broker, Job, Overrides
from onbeat.cli.output import print_json, print_table, say

if TYPE_CHECKING:
    from onbeat.client import AsyncClient
    from onbeat.terminal.sweep import Outcome


def sweep(
    broker: Broker,
    job: Job,
    varied: Annotated[
        list[str] | None,
        typer.Option(
            "--vary", metavar="KEY=VALUE,VALUE", help="Values of a key; with several --vary, every combination is run."
        ),
    ] = None,
    num_seeds: Annotated[
        int, typer.Option("--seeds", min=1, help="Number of seeds of each combination, from the job's seed on.")
    ] = 1,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run a job with several values and seeds, one after the other, and print one table.

    The jobs wait in the broker's queue. Ctrl-C leaves them there, and the same command comes back to them: it creates
    no job twice. The exit code is 0 only if all SUCCEEDED.
    """
    from onbeat.client.datasets import take_local_files
    from onbeat.config import read_job_file
    from onbeat.config.variations import vary
    from onbeat.contracts.states import JobState
    from onbeat.local.run import terminations_as_interrupts
    from onbeat.terminal import sweep as sweeping

    config = read_job_file(job, overrides or [])
    files = take_local_files(config, job.parent)
    variations = vary(config, varied or [], num_seeds)
    if len(variations) < 2:
        raise ValueError("there is nothing to vary: add --vary KEY=VALUE,VALUE or --seeds N")

    async def run(client: "AsyncClient") -> "list[Outcome]":
        for file in files:
            await client.datasets.push(file)
        jobs = await sweeping.submit(client, variations)
        say(f"{len(jobs)} jobs: {', '.join(job.id for job in jobs)}", is_error=True)
        jobs = await sweeping.wait(client, jobs, lambda line: say(line, is_error=True))
        return await sweeping.measure(client, variations, jobs)

    with terminations_as_interrupts():
        try:
            outcomes = broker.change(run)
        except KeyboardInterrupt:
            say("not waiting any more; jobs that were created go on, and the same command comes back", is_error=True)
            raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json({"jobs": [outcome.as_json() for outcome in outcomes]})
    else:
        print_table(*sweeping.table(outcomes))
    raise typer.Exit(0 if all(outcome.job.state is JobState.SUCCEEDED for outcome in outcomes) else 1)
