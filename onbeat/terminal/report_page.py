"""The report of a job as one HTML file: numbers, curves, responses, configuration. It loads and runs nothing."""

import json
import math
from collections.abc import Sequence
from html import escape
from typing import Any

from onbeat.client import AsyncClient, Series
from onbeat.contracts.records import Sample
from onbeat.terminal.report import build_report
from onbeat.terminal.summary import audit_text, examples, total_rows

WIDTH, HEIGHT, PAD = 320, 120, 6  # pixels of a curve
MAX_POINTS = 400  # points of a curve; more are thinned out
FIRST = ("iteration/reward_mean", "eval/reward_mean")  # curves that come first
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1080px;margin:2em auto;padding:0 1em}
table{border-collapse:collapse}th,td{text-align:left;padding:.2em .8em .2em 0;vertical-align:top}
td{white-space:pre-wrap;overflow-wrap:anywhere}figure{display:inline-block;margin:0 1em 1em 0}
figcaption{font-size:13px}svg{background:#f4f4f6}polyline{fill:none;stroke:#3b5bdb;stroke-width:1.5}
pre{background:#f4f4f6;padding:1em;overflow:auto}"""


async def build_page(client: AsyncClient, job_id: str) -> str:
    """Return the page of a job. Raises what the client raises."""
    job, report = await client.jobs.get(job_id), await build_report(client, job_id)
    series = await client.jobs.metrics(job_id)
    rows = [("state", str(job.state)), *total_rows(report), ("audit", await audit_text(client, job_id))]
    samples: list[Sample] = []
    done = [record["iteration"] for record in report["iterations"]]
    for iteration in dict.fromkeys([*done[:1], *done[-1:]]):
        samples += await examples(client, job_id, iteration)
    return page_of(job.name, rows, series, samples, job.config)


def page_of(
    name: str, rows: Sequence[tuple[str, str]], series: Series, samples: Sequence[Sample], config: dict[str, Any]
) -> str:
    """Return the page. All texts may come from models and users, and are escaped."""
    numbers = "".join(f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in rows)
    names = sorted(series, key=lambda curve: (FIRST.index(curve) if curve in FIRST else len(FIRST), curve))
    curves = "".join(curve_of(curve, series[curve]) for curve in names if series[curve])
    said = "".join(
        f"<tr><td>{sample.iteration}</td><td>{escape(sample.prompt)}</td><td>{escape(sample.response)}</td>"
        f"<td>{sample.reward:g}</td></tr>"
        for sample in samples
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>{escape(name)}</title><style>{STYLE}</style>'
        f"<h1>{escape(name)}</h1><table>{numbers}</table><h2>Curves</h2>{curves}<h2>Responses</h2>"
        f"<table><tr><th>iteration</th><th>prompt</th><th>response</th><th>reward</th></tr>{said}</table>"
        f"<h2>Configuration</h2><pre>{escape(json.dumps(config, indent=2))}</pre></html>\n"
    )


def curve_of(name: str, points: Sequence[tuple[int, float]]) -> str:
    """Return a curve as SVG, with its first, last, lowest and highest value in words."""
    points = [(x, y) for x, y in points if math.isfinite(y)] or [(0, 0.0)]
    values = [value for _, value in points]
    low, high = min(values), max(values)
    first, span_x, span_y = points[0][0], (points[-1][0] - points[0][0]) or 1, (high - low) or 1.0
    width, height = WIDTH - 2 * PAD, HEIGHT - 2 * PAD
    shown = points[:: -(-len(points) // MAX_POINTS)]
    places = " ".join(
        f"{PAD + (x - first) / span_x * width:.1f},{PAD + (high - y) / span_y * height:.1f}" for x, y in shown
    )
    words = f"{values[0]:.4g} to {values[-1]:.4g}; from {low:.4g} to {high:.4g}"
    return (
        f'<figure><svg role="img" aria-label="{escape(name)}: {words}" width="{WIDTH}" height="{HEIGHT}">'
        f'<polyline points="{places}"/></svg><figcaption>{escape(name)}<br>{words}</figcaption></figure>'
    )
