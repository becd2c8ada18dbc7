"""The table of charts, and the lines that a job's series make in them. The dashboard reads it, too: table.js there."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

TABLE_FILE = Path(__file__).with_name("table.json")
TOKENS_PER_S = "iteration/tokens_per_s"  # the series that the broker gives in parts

Points = Sequence[tuple[int, float]]  # (iteration, value), ascending
Curves = Mapping[str, Points]  # the keys are names of series


class Entry(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True)


class Colour(Entry):
    light: str
    dark: str


class Group(Entry):
    id: str
    title: str


class LineOfChart(NamedTuple):
    """A line: the name in the legend, the series, and the series with one standard deviation around it."""

    name: str
    series: str
    spread: str | None = None


class Chart(Entry):
    """A chart. It is shown when one of its lines has values, and with `unless_zero` when one of them is not 0."""

    id: str
    title: str
    group: str = ""
    unit: str = ""
    description: str = ""
    is_percent: bool = False  # values are shares
    is_log: bool = False  # a logarithmic scale, if all values are above 0
    unless_zero: bool = False
    domain: tuple[float, float] | None = None  # the least that the y axis shows
    lines: list[LineOfChart] = []
    pattern: str | None = None  # series that match it are lines, named by the first group, in place of `lines`


class Table(Entry):
    colours: list[Colour]
    dashes: list[list[int]]  # pixels of dash and gap, for each colour
    groups: list[Group]
    charts: list[Chart]


@cache
def table() -> Table:
    return Table.model_validate_json(TABLE_FILE.read_bytes())


@cache
def chart(chart_id: str) -> Chart:
    return next(entry for entry in table().charts if entry.id == chart_id)


@dataclass(frozen=True)
class Line:
    """A line as it is drawn. band: (iteration, lower end, upper end) of one standard deviation; empty without one."""

    name: str
    points: Points
    band: Sequence[tuple[int, float, float]] = ()


def with_rates(curves: Curves) -> Curves:
    """Return the finite values of all series, and the tokens per second of each iteration."""
    finite = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in curves.items()}
    prompts, responses = (dict(finite.get(f"iteration/{side}_tokens", [])) for side in ("prompt", "response"))
    rates = [
        (x, (prompts[x] + responses[x]) / wall_s)
        for x, wall_s in finite.get("iteration/wall_s", [])
        if wall_s > 0 and x in prompts and x in responses
    ]
    return finite | ({TOKENS_PER_S: rates} if rates else {})


def lines_of(entry: Chart, curves: Curves) -> list[Line]:
    """Return the lines of a chart that have values; none of a chart that is not to be shown."""
    lines = [line_of(line, curves) for line in series_of(entry, curves) if curves.get(line.series)]
    is_flat = entry.unless_zero and all(y == 0 for line in lines for _, y in line.points)
    return [] if is_flat else lines


def series_of(entry: Chart, curves: Curves) -> list[LineOfChart]:
    """Return the lines of a chart, or those that its pattern matches."""
    names = sorted(set(curves) - repeated_names(curves))
    matches = [match for name in names if entry.pattern and (match := re.search(entry.pattern, name))]
    return [LineOfChart(match[1].replace("reward/", "", 1), match.string) for match in matches] or entry.lines


def repeated_names(curves: Curves) -> set[str]:
    """Return the unnamed scores that a named held-out set has, too.

    The first of several sets has each score twice: as `eval/reward_mean` for readers of one set, and as
    `eval/NAME/reward_mean`.

    >>> repeated_names({"eval/reward_mean": [(0, 0.5)], "eval/easy/reward_mean": [(0, 0.5)], "eval/num": [(0, 1.0)]})
    {'eval/reward_mean'}
    """
    scores = {name.removeprefix("eval/"): list(points) for name, points in curves.items() if name.startswith("eval/")}
    return {
        f"eval/{score}"
        for score, points in scores.items()
        for other, others in scores.items()
        if other.endswith(f"/{score}") and others == points
    }


def line_of(line: LineOfChart, curves: Curves) -> Line:
    points = curves[line.series]
    around = dict(curves.get(line.spread, [])) if line.spread else {}
    is_share = all(0 <= y <= 1 for _, y in points)  # then one deviation around it is a share, too
    band = [(x, y - around[x], y + around[x]) for x, y in points if x in around]
    if is_share:
        band = [(x, max(0.0, low), min(1.0, high)) for x, low, high in band]
    return Line(line.name, points, band)


def other_series(curves: Curves) -> Iterator[str]:
    """Yield the names of the series that are in no chart, sorted."""
    lines = [line for entry in table().charts for line in (*entry.lines, *series_of(entry, curves))]
    shown = {name for line in lines for name in (line.series, line.spread)} | repeated_names(curves)
    yield from (name for name in sorted(curves) if name not in shown and curves[name])
