"""`onbeat doctor [JOB]`: what is wrong, who waits for whom, since when, and what happens next."""

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from onbeat.cli.jobs import print_json
from onbeat.cli.options import AsJson, Broker
from onbeat.cli.output import say

if TYPE_CHECKING:
    from onbeat.client import AsyncClient
    from onbeat.types import Diagnosis

MaybeJobId = Annotated[
    str | None, typer.Argument(metavar="[JOB]", help="Only this job. Default: the whole installation.")
]


def doctor(broker: Broker, job_id: MaybeJobId = None, as_json: AsJson = False) -> None:
    """Report what is wrong and which process waits for which. The exit code is 0 only if nothing is wrong."""
    from onbeat.client import BrokerUnreachable

    def ask_for(client: "AsyncClient") -> "Awaitable[Diagnosis]":
        return client.jobs.explain(job_id) if job_id else client.doctor()

    try:
        found = broker.ask(ask_for)
    except BrokerUnreachable as error:
        found = explain_unreachable(error.url, str(error.__cause__), getattr(error, "__notes__", ()))
    if as_json:
        print_json(found)
    else:
        say(describe(found))
    raise typer.Exit(0 if found.is_healthy else 1)


def explain_unreachable(url: str, reason: str, notes: Sequence[str]) -> "Diagnosis":
    from onbeat.types import Diagnosis, Finding

    sentence = (
        f"the broker at {url} does not answer ({reason}), so nothing else can be examined. Does it run (`onbeat up`, "
        "`docker compose ps`, `kubectl get pods`), and what does its log say? Is this its address (--url, ONBEAT_URL)? "
        "Jobs that are training go on without it until their next iteration"
    )
    findings = [Finding(sentence=each, who="broker", is_problem=True) for each in (sentence, *notes)]
    return Diagnosis(is_healthy=False, findings=findings)


def describe(found: "Diagnosis") -> str:
    """Return the findings as text, with problems and notes (which name a key to change) marked, and a verdict."""
    lines = [
        ("PROBLEM  " if finding.is_problem else "note     " if finding.key else "ok       ") + finding.sentence
        for finding in found.findings
    ]
    num_problems = sum(finding.is_problem for finding in found.findings)
    verdict = "healthy" if found.is_healthy else f"{num_problems} problems" if num_problems > 1 else "1 problem"
    return "\n".join([*lines, verdict])
