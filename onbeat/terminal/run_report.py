"""The facts of a run that is sent to others: a verdict, numbers at the beginning and the end, findings, differences.

report_page.py and report_markdown.py write them down. No folder of the machine that trained is in them.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from onbeat.charts.scale import number
from onbeat.charts.table import Curves, with_rates
from onbeat.client import AsyncClient
from onbeat.config.differences import differences
from onbeat.contracts.records import EvaluationRecord, IterationRecord, JobRecord
from onbeat.contracts.states import EvaluationState, IterationState, JobState
from onbeat.terminal.before_after import BeforeAfter, read_before_after
from onbeat.terminal.folders import values_without_folders, without_folders
from onbeat.terminal.formatting import clip, duration
from onbeat.terminal.report import make_report, make_totals
from onbeat.terminal.summary import audit_text

MOST_ENDS = 5  # iterations that the first and the last value are the mean of
CERTAIN = 2.0  # standard errors by which a reward must differ to have changed
MUCH_TRUNCATED = 0.05  # share of the responses from which the verdict mentions it
MAX_REASON = 300  # characters of an error in the verdict
PERCENT = "percent"
OF_EACH_JOB = re.compile(
    r"name|data(\.\d+)?\.now"
)  # keys that say nothing of the settings: the date is that of creation
NUMBERS = (  # (name, series, unit): rows of the table of numbers
    ("Held-out reward", "eval/reward_mean", ""),
    ("Held-out prompts solved at k", "eval/pass_at_k", PERCENT),
    ("Reward in training", "iteration/reward_mean", ""),
    ("Truncated responses", "rollout/truncated_frac", PERCENT),
    ("Response length, tokens", "rollout/response_tokens_mean", ""),
    ("Entropy, nats", "train/entropy", ""),
    ("Engine against trainer, nats", "iteration/mismatch_mean", ""),
    ("Seconds for an iteration", "iteration/wall_s", ""),
    ("Overlap", "iteration/overlap_frac", PERCENT),
    ("Tokens per second", "iteration/tokens_per_s", ""),
)


@dataclass(frozen=True)
class Numbers:
    """A row of numbers: at the beginning and at the end of the run. last: empty of a series with one value."""

    name: str
    first: str
    last: str


@dataclass(frozen=True)
class RunReport:
    """All that is said of a run. Texts may come from models and users."""

    job: JobRecord
    report: dict[str, Any]  # as `onbeat jobs report` prints it
    curves: Curves
    verdict: str
    numbers: list[Numbers]
    audit: str
    findings: list[str]  # sentences of the doctor: problems, and keys of the job to change
    before_after: BeforeAfter | None

    def note_on_numbers(self) -> str:
        """Return which iterations the first and the last numbers are means of; nothing if they are single values."""
        size = ends_of(len(self.report["iterations"]))
        return f"First and last are means over {size} iterations, but single evaluations." if size > 1 else ""

    @property
    def config(self) -> dict[str, Any]:
        return dict(values_without_folders(self.job.config))

    @property
    def differences(self) -> dict[str, Any]:
        settings = values_without_folders(differences(self.job.config))
        return {key: value for key, value in settings.items() if not OF_EACH_JOB.fullmatch(key)}

    def as_json(self) -> dict[str, Any]:
        """Return the numbers of `onbeat jobs report` with everything else that the page shows."""
        return self.report | {
            "verdict": self.verdict,
            "numbers": [{"name": row.name, "first": row.first, "last": row.last} for row in self.numbers],
            "audit": self.audit,
            "findings": self.findings,
            "before_after": self.before_after and self.before_after.as_json(),
            "differences": self.differences,
        }


async def read_run_report(client: AsyncClient, job_id: str) -> RunReport:
    """Read the facts of a run. Raises what the client raises."""
    job, curves = await client.jobs.get(job_id), with_rates(await client.jobs.metrics(job_id))
    iterations, evaluations = await client.jobs.iterations(job_id), await client.jobs.evaluations(job_id)
    audit, diagnosis = await audit_text(client, job_id), await client.jobs.explain(job_id)
    return RunReport(
        job=job,
        report=make_report(job, iterations, evaluations, await client.jobs.weights(job_id)),
        curves=curves,
        verdict=verdict(job, iterations, evaluations, curves, audit),
        numbers=list(rows_of_numbers(curves)),
        audit=without_folders(audit),
        findings=[
            without_folders(finding.sentence)
            for finding in diagnosis.findings
            if finding.key or (finding.is_problem and not job.state.is_final)  # the verdict says how it ended
        ],
        before_after=await read_before_after(client, job),
    )


# ---- numbers at both ends ----------------------------------------------------------------------------------------


def rows_of_numbers(curves: Curves) -> Iterator[Numbers]:
    """Yield the rows that have values. A series of an iteration counts by means, one of evaluations by its ends."""
    for name, series, unit in NUMBERS:
        values = [value for _, value in curves.get(series, [])]
        if not values:
            continue
        size = 1 if series.startswith("eval/") else ends_of(len(values))
        first, last = fmean(values[:size]), fmean(values[-size:])
        yield Numbers(name, in_unit(first, unit), in_unit(last, unit) if len(values) > 1 else "")


def ends_of(num_values: int) -> int:
    """Return how many values the first and the last mean have, so that no value is in both."""
    return max(1, min(MOST_ENDS, num_values // 2))


def in_unit(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == PERCENT else number(value)


# ---- the verdict -------------------------------------------------------------------------------------------------


def verdict(
    job: JobRecord,
    iterations: Sequence[IterationRecord],
    evaluations: Sequence[EvaluationRecord],
    curves: Curves,
    audit: str,
) -> str:
    """Return in a sentence or two whether the model has learned, and what speaks against it."""
    committed = [record for record in iterations if record.state is IterationState.COMMITTED]
    sentences = [state_in_words(job, len(committed))]
    if committed:
        sentences.append(learning_in_words(committed, evaluations, seconds_of(job, committed)))
    truncated = [share for _, share in curves.get("rollout/truncated_frac", [])]
    if truncated and truncated[-1] >= MUCH_TRUNCATED:
        sentences.append(f"{truncated[-1]:.0%} of the last responses were cut at the limit of tokens.")
    if audit.startswith("VIOLATION"):
        sentences.append("The audit found a violation: do not rely on this run.")
    return " ".join(filter(None, sentences))


def state_in_words(job: JobRecord, num_committed: int) -> str:
    """Return how far the job is; nothing of a job that has succeeded."""
    progress = f"{num_committed} of {job.num_iterations - job.first_iteration} iterations"
    match job.state:
        case JobState.SUCCEEDED:
            return "" if num_committed else "Nothing was trained."
        case JobState.FAILED:
            reason = clip(without_folders(job.error or "no reason was recorded"), MAX_REASON)
            return f"Failed after {progress}: {reason.rstrip('.')}."
        case JobState.CANCELLED:
            return f"Cancelled after {progress}."
    return f"Not finished yet: {job.state.value.lower()} after {progress}."


def seconds_of(job: JobRecord, committed: Sequence[IterationRecord]) -> float:
    """Return the time of the job, as elsewhere in the report; else that of its iterations."""
    totals = make_totals(job, committed)
    return float(totals["wall_s"] if totals["job_s"] is None else totals["job_s"])


def learning_in_words(
    committed: Sequence[IterationRecord], evaluations: Sequence[EvaluationRecord], seconds: float
) -> str:
    scored = [record for record in evaluations if record.state is EvaluationState.DONE]
    scored = [record for record in scored if record.reward_mean is not None]
    over = f"in {len(committed)} iterations ({duration(seconds)})"
    if len(scored) > 1:
        first, last = ([(record.reward_mean, error_of_set(record))] for record in (scored[0], scored[-1]))
        num_prompts = scored[-1].num_groups - scored[-1].num_failed_groups
        return f"{change_in_words('The reward on held-out prompts', first, last)} {over}; {num_prompts} prompts."
    known = [(record.reward_mean, error_of_iteration(record)) for record in committed]
    known = [(reward, error) for reward, error in known if reward is not None]
    size = ends_of(len(known))
    losses = [record.metrics["sft/loss"] for record in committed if "sft/loss" in record.metrics]
    if not known and len(losses) > 1:
        return f"The loss on its examples went from {number(losses[0], 2)} to {number(losses[-1], 2)} {over}."
    if len(known) < 2:
        return "There are too few iterations to say whether it learns."
    change = change_in_words("The reward in training", known[:size], known[-size:])
    if scored:
        reward = number(scored[0].reward_mean or 0.0, 2)
        return f"{change} {over}. The held-out prompts were answered once so far: reward {reward}."
    return f"{change} {over}. Nothing was held out, so this says nothing about new prompts."


Measured = Sequence[tuple[float | None, float]]  # means of rewards with their standard errors


def change_in_words(subject: str, before: Measured, after: Measured) -> str:
    """Return whether the mean rose, fell, or changed by no more than chance explains.

    >>> change_in_words("It", [(0.2, 0.02)], [(0.8, 0.02)]), change_in_words("It", [(0.20, 0.1)], [(0.22, 0.1)])
    ('It rose from 0.2 to 0.8', 'It changed by no more than chance, from 0.2 to 0.22,')
    """
    (first, first_error), (last, last_error) = (mean_with_error(side) for side in (before, after))
    values = f"from {number(first, 2)} to {number(last, 2)}"
    if abs(last - first) <= CERTAIN * math.hypot(first_error, last_error):
        return f"{subject} changed by no more than chance, {values},"
    return f"{subject} {'rose' if last > first else 'fell'} {values}"


def mean_with_error(measured: Measured) -> tuple[float, float]:
    means = [mean or 0.0 for mean, _ in measured]
    return fmean(means), math.hypot(*(error for _, error in measured)) / len(measured)


def error_of_set(record: EvaluationRecord) -> float:
    """Return the standard error of an evaluation's mean. Responses to one prompt count once: they are alike."""
    return (record.reward_std or 0.0) / math.sqrt(max(1, record.num_groups - record.num_failed_groups))


def error_of_iteration(record: IterationRecord) -> float:
    return (record.reward_std or 0.0) / math.sqrt(max(1, record.num_groups - record.num_failed_groups))
