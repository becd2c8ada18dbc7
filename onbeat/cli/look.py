"""Views of what a job has done: `onbeat jobs iterations`, `metrics`, `events`; and `onbeat logs` of local services."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.jobs import app, print_records, print_table, when
from onbeat.cli.options import AsJson, Broker, DataDir, JobId

if TYPE_CHECKING:
    from onbeat.types import IterationRecord

Last = Annotated[int, typer.Option("--last", min=1, help="Number of newest entries to show.")]


@app.command()
def iterations(broker: Broker, job_id: JobId, last: Last = 1000, as_json: AsJson = False) -> None:
    """List iterations: reward, time, tokens and idle shares."""
    found = broker.ask(lambda client: client.jobs.iterations(job_id))[-last:]
    columns = ["iteration", "state", "version", "reward", "std", "seconds", "tokens", "rollouts idle", "trainer idle"]
    print_records(found, as_json, columns, iteration_row)


def iteration_row(record: "IterationRecord") -> Sequence[str]:
    from onbeat.terminal.formatting import number

    return (
        str(record.iteration),
        record.state.value,
        str(record.policy_version),
        number(record.reward_mean, ".3f"),
        number(record.reward_std, ".3f"),
        number(record.wall_s, ".1f"),
        number(record.response_tokens, "d"),
        number(record.rollout_idle_frac, ".0%"),
        number(record.trainer_idle_frac, ".0%"),
    )


@app.command()
def metrics(
    broker: Broker,
    job_id: JobId,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME", help="Name of a curve, such as iteration/reward_mean. Default: all, one per line."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the curves of a job, one per line, or the values of the named curves at each iteration."""
    from onbeat.terminal.formatting import number, sparkline

    series = broker.ask(lambda client: client.jobs.metrics(job_id))
    if unknown := [name for name in names or [] if name not in series]:
        raise ValueError(
            f"job {job_id} has no metric {unknown[0]!r}; it has: {', '.join(sorted(series)) or 'none yet'}"
        )
    if as_json:
        typer.echo(json.dumps({name: series[name] for name in names or sorted(series)}, indent=2))
    elif names:
        by_iteration = {name: dict(series[name]) for name in names}
        numbers = sorted({each for points in by_iteration.values() for each in points})
        rows = [[str(each), *(number(of.get(each), "g") for of in by_iteration.values())] for each in numbers]
        print_table(["iteration", *names], rows)
    else:
        values = {name: [value for _, value in points] for name, points in sorted(series.items()) if points}
        rows = [[name, f"{of[0]:.4g}", f"{of[-1]:.4g}", sparkline(of)] for name, of in values.items()]
        print_table(["metric", "first", "last", "curve"], rows)


@app.command()
def events(broker: Broker, job_id: JobId, last: Last = 1000, as_json: AsJson = False) -> None:
    """List the events of a job, oldest first."""
    found = broker.ask(lambda client: client.jobs.events(job_id))[-last:]
    columns = ["time", "kind", "message"]
    print_records(found, as_json, columns, lambda one: (when(one.time)[5:], one.kind, one.message))


def logs(
    service: Annotated[
        str | None, typer.Argument(metavar="[SERVICE]", help="A service, such as trainer or rollout-0. Default: all.")
    ] = None,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines from the end of each log.")] = 20,
    data_dir: DataDir = None,
) -> None:
    """Print the last log lines of the services on this machine, including services that have ended."""
    from onbeat.local.state import resolve_data_dir

    folder = resolve_data_dir(data_dir) / "logs"
    found = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not found or (service is not None and service not in found):
        there = f"there are: {', '.join(found)}" if found else "no stack was started with this data folder"
        raise ValueError(f"{folder} has no log of {service or 'any service'}; {there}")
    for name in [service] if service else found:
        typer.echo(f"==> {found[name]} <==")
        for line in last_lines(found[name], num_lines):
            typer.echo(line)


def last_lines(path: Path, num_lines: int) -> Iterator[str]:
    from collections import deque

    from onbeat.terminal.formatting import printable

    with path.open(errors="replace") as file:
        yield from map(printable, (line.rstrip("\n") for line in deque(file, num_lines)))
