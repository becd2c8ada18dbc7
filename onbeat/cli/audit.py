"""`onbeat audit JOB`: was every iteration on one policy version, every group used exactly once, and nothing changed?"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.jobs import print_json
from onbeat.cli.options import ApiKey, AsJson, DataDir, JobId, Url, connect

if TYPE_CHECKING:
    from onbeat.types import AuditReport


def audit(
    job_id: JobId,
    url: Url = None,
    api_key: ApiKey = None,
    data_dir: DataDir = None,
    head: Annotated[str, typer.Option(help="The head of an earlier audit: the log must still contain it.")] = "",
    as_json: AsJson = False,
) -> None:
    """Re-check a job's log of groups and versions; exit code 0 only if nothing is wrong."""
    report = asyncio.run(fetch(job_id, head, url, api_key, data_dir))
    if as_json:
        print_json(report)
    else:
        typer.echo(describe(report))
    raise typer.Exit(0 if report.is_clean else 1)


async def fetch(job_id: str, head: str, url: str | None, api_key: str | None, data_dir: Path | None) -> "AuditReport":
    async with connect(url, api_key, data_dir) as client:
        return await client.jobs.audit(job_id, head)


def describe(report: "AuditReport") -> str:
    counts = (
        f"{report.num_entries} entries, {report.num_commits} iterations committed, {report.num_groups} groups accepted"
    )
    if not report.is_clean:
        return f"VIOLATION: {report.violation}\nbefore that: {counts}"
    contents = f"{report.num_contents} of their contents compared"
    gone = f", {report.num_contents_gone} no longer kept" if report.num_contents_gone else ""
    return f"clean: {counts}; {contents}{gone}\nhead {report.head}"
