"""Figures of runs, for notebooks and files. They need matplotlib."""

import io
from collections.abc import Iterator, Sequence
from itertools import zip_longest

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("plots need matplotlib: pip install matplotlib") from error

from onbeat.client import Series
from onbeat.types import Timeline

# The titles of metrics; others are shown by name.
TITLES = {
    "iteration/reward_mean": "reward",
    "eval/reward_mean": "held-out reward",
    "train/kl": "KL",
    "train/entropy": "entropy",
    "train/grad_norm": "gradient norm",
    "train/grad_cosine": "gradient cosine",
    "rollout/response_tokens_mean": "tokens of a response",
    "iteration/mismatch_mean": "mismatch",
    "iteration/tpspd": "TPSPD",
    "iteration/trainer_idle_frac": "trainer idle",
    "iteration/rollout_idle_frac": "rollouts idle",
}
COLORS = {
    "generate": "tab:blue",
    "score": "tab:cyan",
    "pull": "tab:purple",
    "load": "tab:pink",
    "micro_batch": "tab:green",
    "optimizer": "tab:orange",
    "publish": "tab:red",
    "checkpoint": "tab:brown",
    "wait": "lightgrey",
}
NUM_COLUMNS = 3
ROW_INCHES, COLUMN_INCHES = 2.4, 3.6


class Plot(Figure):
    """A figure that a notebook shows by itself; `savefig` writes it to a file."""

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()


def plot_metrics(*runs: Series, names: Sequence[str] | None = None, labels: Sequence[str] = ()) -> Plot:
    """Plot one chart per metric with one curve per run, from the results of `client.jobs.metrics`.

    `names`: the metrics; by default the essential ones that any of the runs has. `labels`: names of the runs, in order.
    A name that ends with `_mean` gets a band of one standard deviation, where the run has its `_std`. Raise ValueError
    when none of the runs has any of the metrics.
    """
    wanted = names if names is not None else list(TITLES)
    present = [name for name in wanted if any(run.get(name) for run in runs)]
    if not present:
        raise ValueError(f"no points of {', '.join(wanted)}: has an iteration been committed?")
    num_rows = -(-len(present) // NUM_COLUMNS)
    num_columns = min(NUM_COLUMNS, len(present))
    figure = Plot(figsize=(COLUMN_INCHES * num_columns, ROW_INCHES * num_rows), layout="constrained")
    for place, name in enumerate(present, start=1):
        axes = figure.add_subplot(num_rows, num_columns, place)
        axes.set_title(escape_formula(TITLES.get(name, name)), fontsize="medium")
        axes.grid(alpha=0.3)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for run, label in zip_longest(runs, labels[: len(runs)]):
            draw_curve(axes, run, name, label)
    if labels:
        figure.axes[0].legend(fontsize="small")
    return figure


def draw_curve(axes: Axes, run: Series, name: str, label: str | None) -> None:
    points = run.get(name, [])
    numbers, values = [number for number, _ in points], [value for _, value in points]
    (line,) = axes.plot(numbers, values, marker="." if len(points) < 30 else "", label=escape_formula(label or ""))
    spread = dict(run.get(name.removesuffix("_mean") + "_std", [])) if name.endswith("_mean") else {}
    around = [(number, value, spread[number]) for number, value in points if number in spread]
    low, high = [value - std for _, value, std in around], [value + std for _, value, std in around]
    axes.fill_between([number for number, _, _ in around], low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def plot_timeline(timeline: Timeline) -> Plot:
    """Plot the result of `client.jobs.timeline`: one lane per process, the trainer on top.

    Raise ValueError when it is empty.
    """
    if not timeline.spans:
        raise ValueError("the timeline is empty: has an iteration been committed?")
    lanes = [lane.id for lane in timeline.lanes]
    figure = Plot(figsize=(10, 1.2 + 0.4 * len(lanes)), layout="constrained")
    axes = figure.add_subplot()
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}  # by lane and kind: (start, seconds)
    for span in timeline.spans:
        bars.setdefault((span.lane, span.kind), []).append((span.start - timeline.start, span.end - span.start))
    for (lane, kind), drawn in bars.items():
        below_top = (lanes.index(lane) - 0.4, 0.8)
        axes.broken_barh(drawn, below_top, facecolors=COLORS.get(kind, "black"), edgecolors="white", linewidth=0.3)
    axes.set_yticks(range(len(lanes)), [escape_formula(text) for text in lane_names(timeline)])
    axes.invert_yaxis()
    axes.set_xlabel("s")
    seen = {kind for _, kind in bars}
    kinds = [kind for kind in COLORS if kind in seen]
    handles = [axes.plot([], color=COLORS[kind], linewidth=6, label=kind.replace("_", "-"))[0] for kind in kinds]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(kinds), fontsize="small")
    return figure


def lane_names(timeline: Timeline) -> Iterator[str]:
    for lane in timeline.lanes:
        yield lane.id if lane.idle_frac is None else f"{lane.id} (idle {lane.idle_frac:.0%})"


def escape_formula(text: str) -> str:
    """Escape dollar signs: in matplotlib they begin a formula."""
    return text.replace("$", r"\$")
