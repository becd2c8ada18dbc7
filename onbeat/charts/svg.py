"""A chart as a piece of HTML that runs no script: a title, a legend, and axes and lines in SVG.

The drawing is as wide as its place: lines are stretched, texts and the widths of lines are not. So a page is readable
on a desk, on a phone and on paper. Colours are variables of the style, for a light and a dark theme; paper is light.
"""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from onbeat.charts.scale import Scale, in_words, scale_of_iterations, scale_of_values
from onbeat.charts.table import Chart, Line, table

MAX_POINTS = 400  # points of a drawn line; each is the mean of its neighbours where there are more
PX_OF_TICK = 32  # height of an interval on the y axis, at least
NUM_X_TICKS = 6
SIZE = 1000  # width and height of the lines, before they are stretched
THEME = {  # (light, dark), as in the dashboard
    "bg": ("#fdfdfc", "#131417"),
    "raised": ("#f3f3f0", "#24272c"),
    "border": ("#e3e2dd", "#31343a"),
    "text": ("#1a1c1f", "#e8e8e5"),
    "muted": ("#5a5d63", "#a6aab0"),
    "good": ("#17703f", "#6fd19a"),
    "bad": ("#b3231b", "#ff9288"),
}
STYLE_FILE = Path(__file__).with_name("chart.css")


def style() -> str:
    """Return the style of charts. It says nothing of elements outside of those with the class `onbeat`."""
    themes = [
        "".join(f"--{name}:{pair[index]};" for name, pair in THEME.items())
        + "".join(
            f"--series-{number}:{(colour.light, colour.dark)[index]};"
            for number, colour in enumerate(table().colours, 1)
        )
        for index in (0, 1)
    ]
    light, dark = themes
    return (
        f".onbeat{{{light}color-scheme:light}}\n"
        f"@media screen and (prefers-color-scheme:dark){{.onbeat{{{dark}color-scheme:dark}}}}\n"
        f"{STYLE_FILE.read_text(encoding='utf-8')}"
    )


def draw_chart(chart: Chart, lines: Sequence[Line], height: int = 150, end: int | None = None) -> str:
    """Return a chart as HTML. The x axis ends at the last point, or at `end`. lines: at least one, with points.

    Names of series may come from users, and are escaped.
    """
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    ys += [y for line in lines for _, *edges in line.band for y in edges]
    x_scale = scale_of_iterations(min(xs), max(max(xs), end or 0), NUM_X_TICKS)
    y_scale = scale_of_values(chart, ys, max(2, height // PX_OF_TICK))
    drawn = "".join(draw_line(line, index, x_scale, y_scale, height) for index, line in enumerate(lines))
    spoken = "; ".join(f"{line.name} {span_in_words(chart, line)}" for line in lines)
    unit = f'<span class="chart-unit">{escape(chart.unit)}</span>' if chart.unit else ""
    width = -(-max(len(line.points) for line in lines) // MAX_POINTS)
    about = f'<span class="chart-about"> each point is the mean of {width}</span>' if width > 1 else ""
    legend = "".join(
        f"<li>{swatch(index)}{escape(line.name)} <b>{escape(span_in_words(chart, line))}</b></li>"
        for index, line in enumerate(lines)
    )
    return (
        f'<figure class="chart"><figcaption><span class="chart-title">{escape(chart.title)}</span>{unit}{about}'
        f'</figcaption><ul class="legend">{legend}</ul><div class="plot"><svg role="img" height="{height}" '
        f'aria-label="{escape(f"{chart.title} by iteration: {spoken} {chart.unit}".strip())}">'
        f"{draw_axes(x_scale, y_scale, height)}{drawn}</svg></div></figure>"
    )


def span_in_words(chart: Chart, line: Line) -> str:
    """Return the first and the last value."""
    first, last = (in_words(chart, y) for _, y in (line.points[0], line.points[-1]))
    return f"{first} → {last}" if len(line.points) > 1 else last


def swatch(index: int) -> str:
    return (
        f'<svg class="swatch" width="24" height="10" aria-hidden="true" style="{colour_of(index)}">'
        f'<line x1="0" x2="24" y1="5" y2="5"{dash_of(index)}/></svg>'
    )


def colour_of(index: int) -> str:
    return f"color:var(--series-{index % len(table().colours) + 1})"


def dash_of(index: int) -> str:
    dash = table().dashes[index % len(table().dashes)]
    return f' stroke-dasharray="{json.dumps(dash)[1:-1]}"' if dash else ""


def draw_axes(x_scale: Scale, y_scale: Scale, height: int) -> str:
    """Return lines and labels of the ticks. Labels lie outside of the drawing, in the padding of its place."""
    parts = []
    for value, label in y_scale.ticks:
        y = (1 - y_scale.place(value)) * height
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
    for value, label in x_scale.ticks:
        place = x_scale.place(value)
        parts.append(f'<text x="{100 * place:.2f}%" y="{height + 16}" text-anchor="middle">{escape(label)}</text>')
    return "".join(parts)


def draw_line(line: Line, index: int, x_scale: Scale, y_scale: Scale, height: int) -> str:
    """Return a line above its band, or a dot where there is one point."""

    def place(x: float, y: float) -> str:
        return f"{SIZE * x_scale.place(x):.1f},{SIZE * (1 - y_scale.place(y)):.1f}"

    points = thinned(line.points)
    if len(points) == 1:
        ((x, y),) = points
        across, down = 100 * x_scale.place(x), (1 - y_scale.place(y)) * height
        return f'<circle cx="{across:.2f}%" cy="{down:.1f}" r="3.5" style="{colour_of(index)}"/>'
    band = thinned(line.band) if not y_scale.is_log else []
    edges = [place(x, high) for x, _, high in band] + [place(x, low) for x, low, _ in reversed(band)]
    area = f'<polygon points="{" ".join(edges)}"/>' if edges else ""
    course = f'<polyline points="{" ".join(place(x, y) for x, y in points)}"{dash_of(index)}/>'
    return (
        f'<svg width="100%" height="{height}" viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" '
        f'style="{colour_of(index)}">{area}{course}</svg>'
    )


def thinned(points: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Return the points, or the means of so many neighbours that there are MAX_POINTS at most."""
    size = -(-len(points) // MAX_POINTS)
    parts = [points[start : start + size] for start in range(0, len(points), size or 1)]
    return [tuple(fmean(values) for values in zip(*part, strict=True)) for part in parts]
