"""`onbeat audit JOB`: was each iteration on one policy version, each group used once, and no record changed?"""

from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.jobs import print_json
from onbeat.cli.options import AsJson, Broker, JobId
from onbeat.cli.output import say

if TYPE_CHECKING:
    from onbeat.types import AuditReport


def audit(
    broker: Broker,
    job_id: JobId,
    head: Annotated[str, typer.Option(help="Head that an earlier audit printed; the log must still contain it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Check a job's log of groups and versions again. The exit code is 0 only if nothing is wrong."""
    report = broker.ask(lambda client: client.jobs.audit(job_id, head))
    if as_json:
        print_json(report)
    else:
        say(describe(report))
    raise typer.Exit(0 if report.is_clean else 1)


def describe(report: "AuditReport") -> str:
    counts = f"{report.num_entries} entries, {report.num_commits} iterations committed, "
    counts += f"{report.num_groups} groups accepted"
    if not report.is_clean:
        return f"VIOLATION: {report.violation}\nbefore that: {counts}"
    contents = f"{report.num_contents} of their contents compared"
    gone = f", {report.num_contents_gone} no longer kept" if report.num_contents_gone else ""
    return f"clean: {counts}; {contents}{gone}\nhead {report.head}"
