"""The terminal view of a job: live with sparklines where there is a terminal, else one plain line per iteration."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from onbeat.client import AsyncClient, BrokerUnreachable
from onbeat.report import num_tokens
from onbeat.types import (
    EvaluationRecord,
    EvaluationState,
    Event,
    IterationRecord,
    IterationState,
    JobRecord,
    JobState,
    WeightsRecord,
    WorkerRecord,
)

BLOCKS = "▁▂▃▄▅▆▇█"
POLL_S = 1.0
UNREACHABLE_DEADLINE_S = 60.0  # a broker that restarts is no reason to stop watching
MAX_NOTICES_OF_A_KIND = 5
NOTICE_KINDS = frozenset(
    {"group.failed", "group.stale", "job.taken_over", "worker.lost", "worker.left", "job.state", "job.warning"}
    | {"evaluation.failed"}
)


class JobProgress:
    """What is known of a job. `update` asks the broker; everything else only looks."""

    def __init__(self, job: JobRecord) -> None:
        self.job = job
        self.iterations: dict[int, IterationRecord] = {}
        self.evaluations: dict[int, EvaluationRecord] = {}
        self.weights: list[WeightsRecord] = []  # once the job is final
        self.workers: list[WorkerRecord] = []
        self.trainer = "not started"
        self._cursor = "0"

    @property
    def committed(self) -> list[IterationRecord]:
        return [record for _, record in sorted(self.iterations.items()) if record.state == IterationState.COMMITTED]

    @property
    def current(self) -> IterationRecord | None:
        """The oldest one that is being generated, or else trained: several may be open at once."""
        records = [record for record in self.iterations.values() if record.state != IterationState.COMMITTED]
        return min(records, key=lambda one: (one.state != IterationState.OPEN, one.iteration), default=None)

    @property
    def scored(self) -> list[EvaluationRecord]:
        return [record for _, record in sorted(self.evaluations.items()) if record.state == EvaluationState.DONE]

    async def update(self, client: AsyncClient, wait_s: float = 0.0) -> list[Event]:
        """Wait up to `wait_s` for something to happen; returns the new events."""
        events = await client.jobs.events(self.job.id, after=self._cursor, wait_s=wait_s)
        committed = self.committed
        newest = committed[-1].iteration if committed else -1
        self.job, records, self.workers = await asyncio.gather(
            client.jobs.get(self.job.id), client.jobs.iterations(self.job.id, newest), client.workers(self.job.pool)
        )
        self.iterations.update({record.iteration: record for record in records})
        if self.job.config.get("evaluation"):
            await self._update_evaluations(client)
        if self.job.state.is_final:
            self.weights = await client.jobs.weights(self.job.id)
        for event in events:
            self._cursor = event.id
            self.trainer = trainer_activity(event) or self.trainer
        return events

    async def _update_evaluations(self, client: AsyncClient) -> None:
        unfinished = [number for number, record in self.evaluations.items() if not record.state.is_over]
        after = min(unfinished) - 1 if unfinished else max(self.evaluations, default=-1)
        records = await client.jobs.evaluations(self.job.id, after)
        self.evaluations.update({record.evaluation: record for record in records})

    def time_left_s(self) -> float | None:
        """By the mean of the last five iterations."""
        walls = [record.wall_s for record in self.committed[-5:] if record.wall_s is not None]
        if not walls or self.job.state.is_final:
            return None
        return sum(walls) / len(walls) * (self.job.num_iterations - self.job.next_iteration)

    def tokens_per_s(self) -> float | None:
        recent = [record for record in self.committed[-5:] if record.wall_s]
        wall_s = sum(record.wall_s or 0.0 for record in recent)
        return sum(map(num_tokens, recent)) / wall_s if wall_s else None


def trainer_activity(event: Event) -> str | None:
    """What the trainer does after this event, in words; None if the event does not tell."""
    iteration = event.data.get("iteration")
    match event.kind:
        case "job.state" if event.data.get("state") == JobState.RUNNING:
            return "loading the model"
        case "job.state":
            return event.data.get("state", event.message).lower()
        case "weights.published":
            return f"published policy version {event.data.get('policy_version')}"
        case "iteration.opened" if event.data.get("policy_version") == iteration:  # else it is opened ahead
            return f"training on groups of iteration {iteration} as they arrive"
        case "iteration.drained":
            return f"last groups and optimizer step of iteration {iteration}"
        case "checkpoint.written":
            return "checkpoint written"
        case kind if kind.startswith("trainer."):
            return event.message
    return None


async def follow(
    client: AsyncClient, job_id: str, console: Console, tick: Callable[[], None] = lambda: None
) -> JobProgress:
    """Show the job until it is final. `tick` is called about every second and may raise."""
    progress = JobProgress(await client.jobs.get(job_id))
    is_live = console.is_terminal and not console.is_dumb_terminal
    notices = Notices(console)
    num_shown, evaluations_shown = 0, set[int]()
    with live_view(progress, console) if is_live else plain_view():
        while True:
            started = time.monotonic()
            events = await update_patiently(progress, client, tick)
            notices.show(events)
            for record in progress.committed[num_shown:] if not is_live else []:
                console.print(plain_line(record, progress), soft_wrap=True)
                num_shown += 1
            for scored in progress.scored if not is_live else []:
                if scored.evaluation not in evaluations_shown:
                    console.print(evaluation_line(scored), soft_wrap=True)
                    evaluations_shown.add(scored.evaluation)
            if progress.job.state.is_final:
                return progress
            await asyncio.sleep(max(0.0, POLL_S - (time.monotonic() - started)))


async def update_patiently(progress: JobProgress, client: AsyncClient, tick: Callable[[], None]) -> list[Event]:
    """Raises BrokerUnreachable when the broker does not come back in time."""
    deadline = time.monotonic() + UNREACHABLE_DEADLINE_S
    while True:
        tick()
        try:
            return await progress.update(client, wait_s=POLL_S)
        except BrokerUnreachable:
            if time.monotonic() > deadline:
                raise
            progress.trainer = "the broker does not answer, trying again"


class Notices:
    """Events that a person should see, a bounded number of each kind."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._counts: dict[str, int] = {}

    def show(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind not in NOTICE_KINDS:
                continue
            count = self._counts[event.kind] = self._counts.get(event.kind, 0) + 1
            if event.kind == "job.state" or count <= MAX_NOTICES_OF_A_KIND:
                self._print(f"{event.kind}: {event.message}")
            elif count == MAX_NOTICES_OF_A_KIND + 1:
                self._print(f"{event.kind}: more of these are counted, not shown")

    def _print(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)


@contextmanager
def plain_view() -> Iterator[None]:
    yield


@contextmanager
def live_view(progress: JobProgress, console: Console) -> Iterator[None]:
    started = time.monotonic()

    def render() -> RenderableType:
        return render_progress(progress, time.monotonic() - started)

    with Live(get_renderable=render, console=console, refresh_per_second=2, transient=True):
        yield


# ---- pure rendering --------------------------------------------------------------------------------------------


def render_progress(progress: JobProgress, elapsed_s: float) -> RenderableType:
    job, committed = progress.job, progress.committed
    left_s = progress.time_left_s()
    head = Text.assemble(
        (f"{job.name} ", "bold"),
        (job.state.lower(), state_style(job.state)),
        f"  iteration {len(committed)} of {job.num_iterations}  ",
        f"{duration(elapsed_s)} elapsed",
        f", about {duration(left_s)} left" if left_s is not None else "",
    )
    table = Table.grid(padding=(0, 2))
    for label, text in rows(progress):
        table.add_row(Text(label, style="dim"), Text(printable(text)))
    bar = Table.grid()  # a bar alone does not end its line
    bar.add_row(ProgressBar(total=job.num_iterations, completed=len(committed), width=60))
    return Group(head, bar, table)


def rows(progress: JobProgress) -> Iterator[tuple[str, str]]:
    rewards = [record.reward_mean for record in progress.committed if record.reward_mean is not None]
    if rewards:
        yield "reward", f"{rewards[-1]:.3f}  {sparkline(rewards)}  best {max(rewards):.3f}"
    scored = progress.scored
    if scored:
        line = sparkline([record.reward_mean for record in scored if record.reward_mean is not None])
        yield "held out", f"{number(scored[-1].reward_mean, '.3f')}  {line}  version {scored[-1].policy_version}"
    tokens_per_s = progress.tokens_per_s()
    if tokens_per_s is not None:
        yield "tokens/s", f"{tokens_per_s:.0f}"
    yield "trainer", progress.trainer
    current = progress.current
    if current is not None:
        groups = f"{current.num_accepted} of {current.num_groups} groups"
        yield "generated", f"{groups} of iteration {current.iteration} on policy version {current.policy_version}"
    for worker in progress.workers:
        yield worker.id, worker_line(worker)
    if not progress.workers:
        yield "rollouts", "none yet"


def worker_line(worker: WorkerRecord) -> str:
    parts = [worker.state]
    if worker.policy_version is not None:
        parts.append(f"version {worker.policy_version}")
    if worker.num_in_flight:
        parts.append(f"{worker.num_in_flight} in flight")
    if worker.tokens_per_s:
        parts.append(f"{worker.tokens_per_s:.0f} tokens/s")
    return ", ".join(parts)


def plain_line(record: IterationRecord, progress: JobProgress) -> Text:
    """One iteration without any control code."""
    left_s = progress.time_left_s()
    parts = [
        f"iteration {record.iteration + 1}/{progress.job.num_iterations}",
        f"version {record.policy_version}",
        f"reward {number(record.reward_mean, '.3f')}",
        f"{number(num_tokens(record) / record.wall_s if record.wall_s else None, '.0f')} tokens/s",
        f"{number(record.wall_s, '.1f')} s",
        f"rollouts idle {number(record.rollout_idle_frac, '.0%')}",
        f"trainer idle {number(record.trainer_idle_frac, '.0%')}",
    ]
    if record.staleness_max:
        parts.insert(2, f"staleness {record.staleness_max}")
    if left_s is not None:
        parts.append(f"about {duration(left_s)} left")
    return Text("  ".join(parts))


def evaluation_line(record: EvaluationRecord) -> Text:
    """One evaluation without any control code."""
    parts = [
        f"evaluation {record.evaluation}",
        f"version {record.policy_version}",
        f"reward {number(record.reward_mean, '.3f')}",
        f"{number(record.response_tokens_mean, '.0f')} tokens",
        f"{number(record.truncated_frac, '.0%')} truncated",
    ]
    if record.pass_at_k is not None:
        parts.insert(3, f"solved {record.pass_at_k:.0%}")
    if record.num_failed_groups:
        parts.append(f"{record.num_failed_groups} of {record.num_groups} prompts failed")
    return Text("  ".join(parts))


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """One block per value (means of neighbours when there are too many), from the lowest to the highest value.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[int((value - low) * scale + 0.5)] for value in values)


def duration(seconds: float) -> str:
    """7 s, 2 min 05 s, 3 h 20 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number(value: float | None, spec: str) -> str:
    return format(value, spec) if value is not None else "-"


def state_style(state: JobState) -> str:
    return {JobState.SUCCEEDED: "bold green", JobState.FAILED: "bold red"}.get(state, "yellow")


def printable(value: Any) -> str:
    """Text of a model or a server cannot move the cursor: control characters become visible escapes."""
    text = str(value)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
