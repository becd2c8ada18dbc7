"""Records as HTML, for notebooks. Models and users write what is in them: all of it is escaped."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape

from onbeat.types import (
    AuditReport,
    Diagnosis,
    EvaluationRecord,
    Event,
    GroupDetail,
    IterationRecord,
    JobRecord,
    Lane,
    Record,
    Sample,
    Timeline,
    WorkerRecord,
)

MAX_ROWS = 200
MAX_CHARACTERS = 1000  # of a text in a cell
# Of a table of such records; of other ones, all fields.
COLUMNS: dict[type[Record], Sequence[str]] = {
    JobRecord: ("id", "name", "pool", "state", "next_iteration", "num_iterations", "policy_version", "created_at"),
    IterationRecord: (
        *("iteration", "state", "policy_version", "reward_mean", "reward_std", "wall_s", "tpspd"),
        *("rollout_idle_frac", "trainer_idle_frac", "mismatch_mean"),
    ),
    EvaluationRecord: (
        *("evaluation", "state", "policy_version", "reward_mean", "pass_at_k"),
        *("response_tokens_mean", "truncated_frac", "message"),
    ),
    Sample: ("iteration", "group_id", "prompt", "response", "reward", "advantage", "num_tokens"),
    Event: ("time", "kind", "message"),
    WorkerRecord: (
        *("id", "job_id", "state", "policy_version", "num_in_flight"),
        *("tokens_per_s", "num_devices", "last_seen_at"),
    ),
}


def record_html(record: Record) -> str:
    match record:
        case JobRecord():
            return wrap(job_html(record))
        case Diagnosis():
            return wrap(diagnosis_html(record))
        case AuditReport():
            return wrap(audit_html(record))
        case GroupDetail():
            about = f"<p>{cell('prompt', record.prompt)}</p>" + (
                f"<p>{escape(record.failure)}</p>" * bool(record.failure)
            )
            return wrap(about + rows_html(("index", "response", "reward", "advantage", "num_tokens"), record.responses))
        case Timeline():
            about = f"<p>{len(record.spans)} spans in {record.end - record.start:.1f} s</p>"
            return wrap(about + rows_html(tuple(Lane.model_fields), record.lanes))
    return wrap(fields_html(type(record).model_fields, record))


def table_html(records: Sequence[Record]) -> str:
    if not records:
        return wrap("<p>none</p>")
    kind = type(records[0])
    return wrap(rows_html(COLUMNS.get(kind, tuple(kind.model_fields)), records))


def wrap(content: str) -> str:
    """Notebooks would take dollar signs in a text for formulas."""
    return f'<div class="tex2jax_ignore mathjax_ignore">{content}</div>'


def job_html(job: JobRecord) -> str:
    done = f'<progress value="{job.next_iteration}" max="{job.num_iterations}"></progress>'
    head = f"<p><b>{escape(job.name)}</b> {escape(job.state)} {done} {job.next_iteration} of {job.num_iterations}</p>"
    names = ("id", "pool", "error", "queue_position", "policy_version", "created_at", "started_at", "finished_at")
    return head + fields_html((*names, "checkpoint"), job)


def diagnosis_html(found: Diagnosis) -> str:
    items = "".join(
        f"<li>{'<b>PROBLEM</b> ' if finding.is_problem else ''}{escape(finding.sentence)}</li>"
        for finding in found.findings
    )
    return f"<p><b>{'healthy' if found.is_healthy else 'not healthy'}</b></p><ul>{items}</ul>"


def audit_html(report: AuditReport) -> str:
    verdict = "clean" if report.is_clean else f"VIOLATION: {report.violation}"
    counts = ("num_entries", "num_groups", "num_commits", "num_contents", "num_contents_gone", "head")
    return f"<p><b>{escape(verdict)}</b></p>" + fields_html(counts, report)


def fields_html(names: Iterable[str], record: Record) -> str:
    """Those that are known."""
    rows = [
        f'<tr><th style="text-align: left">{escape(name)}</th><td>{cell(name, getattr(record, name))}</td></tr>'
        for name in names
        if getattr(record, name) not in (None, "", {}, [])
    ]
    return f"<table>{''.join(rows)}</table>"


def rows_html(names: Sequence[str], records: Sequence[Record]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = [
        "<tr>" + "".join(f"<td>{cell(name, getattr(record, name))}</td>" for name in names) + "</tr>"
        for record in records[:MAX_ROWS]
    ]
    more = f"<p>and {len(records) - MAX_ROWS} more</p>" if len(records) > MAX_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}"


def cell(name: str, value: object) -> str:
    """As HTML. Times by this machine's clock."""
    if value is None:
        return ""
    if isinstance(value, float):
        is_time = name == "time" or name.endswith("_at")
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S") if is_time else f"{value:.4g}"
    text = str(value)
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS] + " ..."
    return f'<span style="white-space: pre-wrap; text-align: left">{escape(text)}</span>'
