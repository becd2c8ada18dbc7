"""Records as HTML, for notebooks: they call `_repr_html_` of what a cell returns.

The types of the records are contracts and contain no HTML: importing `onbeat.client` adds that method to them. A record
may contain text from models and users, so all of it is escaped.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import SupportsIndex, TypeVar, overload

from onbeat.types import EvaluationRecord, Event, Finding, IterationRecord, JobRecord, Record, Sample, WorkerRecord

MAX_ROWS = 200
MAX_CHARACTERS = 1000  # characters of a text in a cell
# The columns of tables of these records. Other tables show all fields.
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
    Sample: ("iteration", "group_id", "index", "prompt", "response", "reward", "advantage", "num_tokens"),
    Event: ("time", "kind", "message"),
    Finding: ("is_problem", "sentence"),
    WorkerRecord: (
        *("id", "job_id", "state", "policy_version", "num_in_flight"),
        *("tokens_per_s", "num_devices", "last_seen_at"),
    ),
}

RecordT = TypeVar("RecordT", bound=Record)


class Records(list[RecordT]):
    """A list that notebooks show as a table."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> RecordT: ...
    @overload
    def __getitem__(self, index: slice) -> "Records[RecordT]": ...
    def __getitem__(self, index: SupportsIndex | slice) -> "RecordT | Records[RecordT]":
        return Records(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def _repr_html_(self) -> str:
        return wrap(table_html(self))


def record_html(record: Record) -> str:
    """Return the known fields as a table, with lists of records as tables inside."""
    names = [name for name, field in type(record).model_fields.items() if field.repr]
    rows = [
        f'<tr><th style="text-align: left">{escape(name)}</th><td>{cell_html(name, value)}</td></tr>'
        for name in names
        if (value := getattr(record, name)) not in (None, "", {}, [])
    ]
    progress = ""
    if isinstance(record, JobRecord):
        progress = f'<progress value="{record.next_iteration}" max="{record.num_iterations}"></progress>'
    return wrap(f"{progress}<table>{''.join(rows)}</table>")


def wrap(content: str) -> str:
    """Wrap the content so that notebooks do not take dollar signs in a text for formulas."""
    return f'<div class="tex2jax_ignore mathjax_ignore">{content}</div>'


def table_html(records: Sequence[Record]) -> str:
    if not records:
        return "<p>none</p>"
    kind = type(records[0])
    names = COLUMNS.get(kind, tuple(kind.model_fields))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = "".join(row_html(names, record) for record in records[:MAX_ROWS])
    more = f"<p>and {len(records) - MAX_ROWS} more</p>" if len(records) > MAX_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"


def row_html(names: Iterable[str], record: Record) -> str:
    return "<tr>" + "".join(f"<td>{cell_html(name, getattr(record, name))}</td>" for name in names) + "</tr>"


def cell_html(name: str, value: object) -> str:
    """Return the value of a field as HTML. Times are by this machine's clock."""
    if value is None:
        return ""
    if isinstance(value, list) and value and isinstance(value[0], Record):
        return table_html(value)
    if isinstance(value, float):
        is_time = name in ("time", "start", "end") or name.endswith("_at")
        return datetime.fromtimestamp(value).strftime("%Y-%m-%d %H:%M:%S") if is_time else f"{value:.4g}"
    text = str(value)
    if len(text) > MAX_CHARACTERS:
        text = text[:MAX_CHARACTERS] + " ..."
    return f'<span style="white-space: pre-wrap; text-align: left">{escape(text)}</span>'


Record._repr_html_ = record_html  # type: ignore[attr-defined]
