"""A job as a notebook shows it: what it is, and its rewards as the charts that its report has."""

from html import escape

from onbeat.charts.svg import draw_chart, style
from onbeat.charts.table import Curves, chart, lines_of, with_rates
from onbeat.contracts.records import JobRecord
from onbeat.contracts.states import JobState

CHARTS = ("reward", "held-out")
HEIGHT = 160  # pixels
LAYOUT = ".onbeat-job{padding:12px 16px;display:grid;gap:16px;max-width:900px}.onbeat-job p{margin:0}"
ENDED_EARLY = (JobState.FAILED, JobState.CANCELLED)


def last_iteration(job: JobRecord) -> int | None:
    """Return the end of the axis of a job's charts: the job's number of iterations.

    None: charts end at their last value, as those of a job that failed or was cancelled do.
    """
    return None if job.state in ENDED_EARLY else job.num_iterations


def html_of_job(job: JobRecord, curves: Curves) -> str:
    """Return the job as HTML without scripts. Names come from users, and are escaped."""
    curves = with_rates(curves)
    with_lines = [(chart(name), lines_of(chart(name), curves)) for name in CHARTS]
    charts = [draw_chart(entry, lines, HEIGHT, last_iteration(job)) for entry, lines in with_lines if lines]
    about = f"{job.state.value.lower()} · {job.next_iteration} of {job.num_iterations} iterations · {job.id}"
    return (
        f'<div class="onbeat onbeat-job"><style>{style()}{LAYOUT}</style>'
        f'<p><span class="chart-title">{escape(job.name)}</span><span class="chart-about">{escape(about)}</span></p>'
        f"{''.join(charts) or '<p>No iteration is committed yet.</p>'}</div>"
    )
