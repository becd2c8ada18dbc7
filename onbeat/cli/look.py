"""Views of jobs: `onbeat jobs iterations`, `metrics`, `events`; `audit`, `doctor`, `report`, `logs`, `top`."""

import json
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.jobs import app
from onbeat.cli.options import AsJson, Broker, DataDir, JobId, make_console
from onbeat.cli.output import print_json, print_records, print_table, say, when
from onbeat.process.stacks import resolve_data_dir
from onbeat.terminal.formatting import Column, number, printable, sparkline

if TYPE_CHECKING:
    from onbeat.client import AsyncClient, BrokerUnreachable
    from onbeat.contracts.records import AuditReport, Diagnosis, IterationRecord

Last = Annotated[int, typer.Option("--last", min=1, help="Number of newest entries to show.")]


@app.command()
def iterations(broker: Broker, job_id: JobId, last: Last = 1000, as_json: AsJson = False) -> None:
    """List iterations: reward, time, tokens and idle shares."""
    iterations = broker.ask(lambda client: client.jobs.iterations(job_id))[-last:]
    idle = ("rollouts idle", "trainer idle")
    columns = ("iteration", "state", "version", "reward", Column("std", 2), "seconds", Column("tokens", 1), *idle)
    print_records(iterations, as_json, columns, iteration_row)


def iteration_row(record: "IterationRecord") -> Sequence[str]:
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
    """Print the curves of a job in groups, one per line, or the values of the named curves at each iteration."""
    from onbeat.terminal.metric_groups import group_metrics

    series = broker.ask(lambda client: client.jobs.metrics(job_id))
    if unknown := [name for name in names or [] if name not in series]:
        raise ValueError(
            f"job {job_id} has no metric {unknown[0]!r}; it has: {', '.join(sorted(series)) or 'none yet'}"
        )
    if as_json:
        print_json({name: series[name] for name in names or sorted(series)})
    elif names:
        by_iteration = {name: dict(series[name]) for name in names}
        numbers = sorted({iteration for points in by_iteration.values() for iteration in points})
        rows = [
            [str(iteration), *(number(points.get(iteration), "g") for points in by_iteration.values())]
            for iteration in numbers
        ]
        print_table(["iteration", *names], rows)
    else:
        rows = []
        for title, group in group_metrics(series).items():
            rows.append([f"{title}:", "", "", ""])
            for name in group:
                curve = [value for _, value in series[name]]
                rows.append([f"  {name}", f"{curve[0]:.4g}", f"{curve[-1]:.4g}", sparkline(curve)])
        print_table(["metric", "first", "last", "curve"], rows)


@app.command()
def events(broker: Broker, job_id: JobId, last: Last = 1000, as_json: AsJson = False) -> None:
    """List the events of a job, oldest first."""
    events = broker.ask(lambda client: client.jobs.events(job_id))[-last:]
    columns = ["time", "kind", "message"]
    print_records(events, as_json, columns, lambda event: (when(event.time)[5:], event.kind, event.message))


def audit(
    broker: Broker,
    job_id: JobId,
    head: Annotated[str, typer.Option(help="Head that an earlier audit printed; the log must still contain it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Check a job's log of groups and versions again. The exit code is 0 only if nothing is wrong, and
    of a job that is over at least one group was trained."""
    report = broker.ask(lambda client: client.jobs.audit(job_id, head))
    if as_json:
        print_json(report)
    else:
        say(describe_audit(report))
    raise typer.Exit(0 if report.is_clean else 1)


def describe_audit(report: "AuditReport") -> str:
    counts = f"{report.num_entries} entries, {report.num_commits} iterations committed, "
    counts += f"{report.num_groups} groups accepted"
    if report.num_failed_groups:
        counts += f", {report.num_failed_groups} of them failed and not trained"
    if report.violation is not None:
        return f"VIOLATION: {report.violation}\nbefore that: {counts}"
    contents = f"{report.num_contents} of their contents compared"
    gone = f", {report.num_contents_gone} no longer kept" if report.num_contents_gone else ""
    rules = "" if report.answer_rules is None else f"; answers compared by version {report.answer_rules} of their rules"
    loads = f"{report.num_loads} loads of weights compared"
    unknown = f", {report.num_loads_unknown} recorded no digest" if report.num_loads_unknown else ""
    verdict = "clean" if report.is_clean else "NOTHING TRAINED"
    return f"{verdict}: {counts}; {contents}{gone}{rules}; {loads}{unknown}\nhead {report.head}"


def doctor(
    broker: Broker,
    job_id: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Only this job. Default: the whole installation.")
    ] = None,
    is_verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Also leases, streams and deadlines.")] = False,
    as_json: AsJson = False,
) -> None:
    """Report what is wrong and which process waits for which. The exit code is 0 only if nothing is wrong."""
    from onbeat.client import BrokerUnreachable

    def ask_for(client: "AsyncClient") -> "Awaitable[Diagnosis]":
        return client.jobs.explain(job_id) if job_id else client.doctor()

    try:
        diagnosis = broker.ask(ask_for)
    except BrokerUnreachable as error:
        diagnosis = explain_unreachable(error, job_id)
    if as_json:
        print_json(diagnosis)
    else:
        say(describe_findings(diagnosis, is_verbose))
    raise typer.Exit(0 if diagnosis.is_healthy else 1)


def explain_unreachable(error: "BrokerUnreachable", job_id: str | None) -> "Diagnosis":
    from onbeat.contracts.records import Diagnosis, Finding

    if job_id is not None and error.status == 503:  # the broker itself says what is wrong
        sentence = f"{error}; `onbeat doctor` without a job looks at Redis, too"
    else:
        sentence = (
            f"the broker at {error.url} does not answer ({error.reason}), so nothing else can be examined. Does it run "
            "(`onbeat up`, `docker compose ps`, `kubectl get pods`), and what does its log say? Is this its address "
            "(--url, ONBEAT_URL)? Jobs that are training go on without it until their next iteration"
        )
    notes = getattr(error, "__notes__", ())
    findings = [Finding(sentence=note, who="broker", is_problem=True) for note in (sentence, *notes)]
    return Diagnosis(is_healthy=False, findings=findings)


def describe_findings(diagnosis: "Diagnosis", is_verbose: bool = False) -> str:
    """Return the findings as text, with problems and notes (which name a key to change) marked, and a verdict. Details
    that are no problem are left out, unless `is_verbose`."""
    lines = [
        ("PROBLEM  " if finding.is_problem else "note     " if finding.key else "ok       ") + finding.sentence
        for finding in diagnosis.findings
        if is_verbose or finding.is_problem or not finding.is_detail
    ]
    num_problems = sum(finding.is_problem for finding in diagnosis.findings)
    health = "healthy" if diagnosis.is_healthy else f"{num_problems} problems" if num_problems > 1 else "1 problem"
    return "\n".join([*lines, f"{diagnosis.verdict}; {health}" if diagnosis.verdict else health])


class ReportFormat(StrEnum):
    """The forms of a report: a page to send, text for a pull request, numbers for programs."""

    HTML = "html"
    MD = "md"
    JSON = "json"


def report(
    broker: Broker,
    job_id: JobId,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write. Default: report.html; md and json: the terminal."),
    ] = None,
    given_form: Annotated[
        ReportFormat | None,
        typer.Option(
            "--format", help="html: a page to send; md: text for a pull request; json: numbers. Default: html."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Report a job to others: a verdict, curves, answers before and after, the audit, the differences from defaults."""
    from onbeat.terminal.report import check_report_path, write_whole
    from onbeat.terminal.report_markdown import markdown_of
    from onbeat.terminal.report_page import page_of
    from onbeat.terminal.run_report import read_run_report

    if as_json and given_form not in (None, ReportFormat.JSON):
        raise ValueError(f"--json and --format {given_form} ask for two forms; leave one out")
    form = ReportFormat.JSON if as_json else given_form or ReportFormat.HTML
    if output is None and form is ReportFormat.HTML:
        output = Path("report.html")
    if output is not None:
        check_report_path(output)
    run = broker.ask(lambda client: read_run_report(client, job_id))
    match form:
        case ReportFormat.HTML:
            text = page_of(run)
        case ReportFormat.MD:
            text = markdown_of(run)
        case ReportFormat.JSON:
            text = json.dumps(run.as_json(), indent=2) + "\n"
    if output is None:
        typer.echo("\n".join(map(printable, text.removesuffix("\n").split("\n"))))  # not wrapped: people copy it
    else:
        write_whole(output, text)
        typer.echo(f"{output} is written")


def logs(
    service: Annotated[
        str | None, typer.Argument(metavar="[SERVICE]", help="A service, such as trainer or rollout-0. Default: all.")
    ] = None,
    num_lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines from the end of each log.")] = 20,
    data_dir: DataDir = None,
) -> None:
    """Print the last log lines of the services on this machine, including services that have ended."""
    folder = resolve_data_dir(data_dir) / "logs"
    logs = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if not logs or (service is not None and service not in logs):
        there = f"there are: {', '.join(logs)}" if logs else "no stack was started with this data folder"
        raise ValueError(f"{folder} has no log of {service or 'any service'}; {there}")
    for name in [service] if service else logs:
        typer.echo(f"==> {logs[name]} <==")
        with logs[name].open(encoding="utf-8", errors="replace") as file:
            for line in deque(file, num_lines):
                typer.echo(printable(line.rstrip("\n")))


def top(
    broker: Broker,
    pool: Annotated[
        str | None, typer.Option(help="Only this pool. Default: `default` and the pools of all jobs.")
    ] = None,
    is_once: Annotated[bool, typer.Option("--once", help="Print one plain table and exit, as in a pipe.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show jobs and rollouts as they run, refreshed every 2 s; q or Ctrl-C ends it."""
    from onbeat.local.run import terminations_as_interrupts
    from onbeat.terminal.live import can_redraw
    from onbeat.terminal.top import plain_lines, show_top, take_overview

    console = make_console()
    if can_redraw(console) and not (as_json or is_once):
        with terminations_as_interrupts(), suppress(KeyboardInterrupt):
            broker.ask(lambda client: show_top(client, pool, console))
        return
    overview = broker.ask(lambda client: take_overview(client, pool))
    if as_json:
        print_json(overview.as_json())
    else:
        typer.echo("\n".join(plain_lines(overview, time.time())))
