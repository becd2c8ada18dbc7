"""The report of a job as one HTML file to send: it loads and runs nothing, and prints on two pages.

The page says whether the run learned, shows it, and lets answers before and after be read; the rest is folded.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path

from onbeat.charts.scale import in_words
from onbeat.charts.svg import draw_chart, style
from onbeat.charts.table import Chart, Curves, LineOfChart, chart, line_of, lines_of, other_series, table
from onbeat.client.notebook import last_iteration
from onbeat.config.differences import as_lines, flatten
from onbeat.terminal.answers import short_text_of, without_shared_lines
from onbeat.terminal.before_after import Answer, BeforeAfter, Pair
from onbeat.terminal.folders import without_folders
from onbeat.terminal.formatting import clip, duration
from onbeat.terminal.run_report import RunReport
from onbeat.terminal.summary import total_rows

STYLE_FILE = Path(__file__).with_name("report.css")
LARGE = ("held-out", "reward")  # charts over the whole width
SMALL = ("length", "entropy", "time", "overlap", "truncated")
LARGE_PX, SMALL_PX = 200, 112
NUM_PAIRS = 4
MAX_PROMPT = 400  # characters
LEFT_OUT = ("job", "checkpoint", "reason")  # rows of the summary that are elsewhere, or concern one machine


def page_of(run: RunReport) -> str:
    """Return the page. All texts may come from models and users, and are escaped."""
    title = escape(run.job.name)
    parts = [*head(run), *lead(run), *answers(run.before_after), *checks(run), *folded(run)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title>'
        f'<style>\n{style()}{STYLE_FILE.read_text(encoding="utf-8")}</style></head><body class="onbeat"><main>\n'
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


# ---- what is seen first ------------------------------------------------------------------------------------------


def head(run: RunReport) -> Iterator[str]:
    job = run.job
    yield f"<h1>{escape(job.name)}</h1>"
    yield f'<p class="verdict">{escape(run.verdict)}</p>'
    yield f'<p class="about">{escape(" · ".join(filter(None, about(run))))}</p>'
    yield f'<dl class="figures">{"".join(figures(run))}</dl>'
    if note := run.note_on_numbers():
        yield f'<p class="about">{note}</p>'


def about(run: RunReport) -> Iterator[str]:
    job, config = run.job, run.config
    yield str(config.get("model", {}).get("path", "")).removeprefix("bundled:")
    yield str(config.get("objective", {}).get("type", ""))
    yield job.dtype or ""
    yield f"rows of {job.max_tokens_per_micro_batch} tokens" if job.max_tokens_per_micro_batch else ""
    totals = run.report["totals"]
    yield f"{totals['iterations']} of {job.num_iterations - job.first_iteration} iterations"
    yield duration(totals["job_s"] if totals["job_s"] is not None else totals["wall_s"])
    yield datetime.fromtimestamp(job.started_at or job.created_at, UTC).strftime("%d %B %Y").lstrip("0")
    yield job.id


def figures(run: RunReport) -> Iterator[str]:
    """Yield the largest numbers: the reward at both ends, and what an iteration takes."""
    names = ("Held-out reward", "Reward in training", "Truncated responses", "Seconds for an iteration", "Overlap")
    rows = {row.name: row for row in run.numbers}
    for name in names:
        if (row := rows.get(name)) is None:
            continue
        before = f'<span class="from">{escape(row.first)} → </span>' if row.last else ""
        yield f"<div><dt>{name}</dt><dd>{before}{escape(row.last or row.first)}</dd></div>"


def lead(run: RunReport) -> Iterator[str]:
    """Yield the charts that are always seen."""
    large = drawn(run, [chart(name) for name in LARGE], LARGE_PX)
    small = drawn(run, [chart(name) for name in SMALL], SMALL_PX)
    if large:
        yield f'<section class="large">{large}</section>'
    if small:
        yield f'<section class="charts">{small}</section>'
    if not large and not small:
        yield "<p>No iteration was committed, so there are no curves.</p>"


def drawn(run: RunReport, charts: Sequence[Chart], height: int) -> str:
    """Return those of the charts that have values, on an axis of all iterations of the job."""
    end = last_iteration(run.job)
    with_lines = [(entry, lines_of(entry, run.curves)) for entry in charts]
    return "".join(draw_chart(entry, lines, height, end) for entry, lines in with_lines if lines)


# ---- answers -----------------------------------------------------------------------------------------------------


def answers(before_after: BeforeAfter | None) -> Iterator[str]:
    if before_after is None:
        return
    yield '<section class="answers"><h2>Before and after</h2>'
    yield f"<p>{escape(before_after.sentence())}</p>"
    pairs = before_after.telling(NUM_PAIRS)
    shared, prompts = without_shared_lines([pair.prompt for pair in pairs])
    if shared:
        yield f'<p>All prompts begin with:</p><div class="prompt text">{escape(clip(shared, MAX_PROMPT))}</div>'
    yield from (pair_of(pair, prompt) for pair, prompt in zip(pairs, prompts, strict=True))
    yield "</section>"


def pair_of(pair: Pair, prompt: str) -> str:
    sides = [side_of("Before", pair.before), side_of("After", pair.after)]
    return (
        f'<article class="pair"><div class="prompt text">{escape(clip(prompt, MAX_PROMPT))}</div>'
        f'<div class="sides">{"".join(sides)}</div></article>'
    )


def side_of(name: str, answer: Answer | None) -> str:
    if answer is None:
        return ""
    colour = "right" if answer.is_right else "wrong"
    return (
        f'<div><h3>{name} <span class="{colour}">{escape(answer.judgement)}</span></h3>'
        f'<div class="text">{escape(short_text_of(answer.sample)) or "(empty)"}</div></div>'
    )


# ---- checks, and the rest ----------------------------------------------------------------------------------------


def checks(run: RunReport) -> Iterator[str]:
    yield f"<section><h2>Audit</h2><p>{escape(run.audit[:1].upper() + run.audit[1:])}.</p>"
    if run.findings:
        items = "".join(f"<li>{escape(finding)}</li>" for finding in run.findings)
        yield f'<h2>Findings</h2><ul class="findings">{items}</ul>'
    yield "</section>"
    settings = "".join(
        f"<li><span>{escape(name)}</span><code>{escape(value)}</code></li>"
        for name, _, value in (line.partition(" = ") for line in as_lines(run.differences))
    )
    yield f'<section><h2>Other than the defaults</h2><ul class="settings">{settings}</ul></section>'


def folded(run: RunReport) -> Iterator[str]:
    shown = {*LARGE, *SMALL}
    for group in table().groups:
        charts = [entry for entry in table().charts if entry.group == group.id and entry.id not in shown]
        if curves := drawn(run, charts, SMALL_PX):
            yield fold(group.title, f'<div class="charts">{curves}</div>')
    if others := drawn_others(run, run.curves):
        yield fold("More series", f'<div class="charts">{others}</div>')
    rows = [(row.name, f"{row.first} → {row.last}" if row.last else row.first) for row in run.numbers]
    rows += [(name, without_folders(text)) for name, text in total_rows(run.report) if name not in LEFT_OUT]
    numbers = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in rows)
    yield fold("All numbers", f"<table>{numbers}</table>")
    yield fold("Whole configuration", f"<pre>{escape(chr(10).join(as_lines(flatten(run.config))))}</pre>")


def drawn_others(run: RunReport, curves: Curves) -> str:
    """Return small charts of the series that move and are in no chart; of the others the value."""
    names = list(other_series(curves))
    moving = [name for name in names if len({value for _, value in curves[name]}) > 1]
    constant = [name for name in names if name not in moving]
    charts = [Chart(id=name, title=name) for name in moving]
    lines = [line_of(LineOfChart("value", name), curves) for name in moving]
    figures = "".join(
        draw_chart(entry, [line], SMALL_PX, last_iteration(run.job)) for entry, line in zip(charts, lines, strict=True)
    )
    values = ", ".join(f"{name} {in_words(Chart(id=name, title=name), curves[name][0][1])}" for name in constant)
    return figures + (f'<p class="constants">Always the same: {escape(values)}.</p>' if constant else "")


def fold(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"
