"""Views of a job in a terminal: a live view that fits any size, and plain lines without any control code."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from onbeat.contracts.deadlines import SILENT_S
from onbeat.contracts.records import EvaluationRecord, IterationRecord, JobRecord, WorkerRecord
from onbeat.contracts.response_stats import rewards_of_sets
from onbeat.contracts.states import JobState
from onbeat.terminal.formatting import duration, number, printable, shortened, sparkline
from onbeat.terminal.job_progress import JobProgress
from onbeat.terminal.report import num_tokens

LABEL_WIDTH = 11
NEWEST_HEARTBEAT_S = 5.0  # a live pool's newest heartbeat is not older
MAX_SENTENCE_LINES = 3
BAR_WIDTH = 40


@dataclass(frozen=True)
class Row:
    label: str
    text: str
    style: str = ""
    max_lines: int = 1


class JobView:
    """The essentials, most important first: a small terminal shows the first lines."""

    def __init__(self, progress: JobProgress, now: float, is_broker_lost: bool = False) -> None:
        self._progress, self._now, self._is_broker_lost = progress, now, is_broker_lost

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, room = options.max_width, max(2, console.height - 1)
        lines = [head_line(self._progress.job, width), bar_line(self._progress, self._now, width)]
        for row in rows(self._progress, width, self._is_broker_lost):
            lines += row_lines(row, console, width)
        workers = [worker for worker in self._progress.workers if worker.job_id in (None, self._progress.job.id)]
        now = heartbeat_time(workers, self._now)
        rollouts = [
            Row(worker.id, worker_line(worker, now), "red" if is_silent(worker, now) else "") for worker in workers
        ]
        if not 0 < len(rollouts) <= room - len(lines):  # show all of them, or none
            rollouts = [rollouts_row(workers, now)]
        for row in rollouts:
            lines += row_lines(row, console, width)
        for line in lines[:room]:
            line.truncate(width, overflow="ellipsis")
            yield line


def row_lines(row: Row, console: Console, width: int) -> list[Text]:
    """Return the row's lines: long text continues below itself, for `max_lines`."""
    indent = LABEL_WIDTH + 2
    text = Text(printable(row.text), style=row.style)
    lines = list(text.wrap(console, max(10, width - indent))) if row.max_lines > 1 else [text]
    if len(lines) > row.max_lines:
        lines = lines[: row.max_lines]
        lines[-1].truncate(max(10, width - indent - 2))
        lines[-1].append(" …")
    label = Text(set_cell_size(set_cell_size(printable(row.label), LABEL_WIDTH), indent), style="dim")
    return [Text.assemble(label if place == 0 else " " * indent, line) for place, line in enumerate(lines)]


def head_line(job: JobRecord, width: int) -> Text:
    name = shortened(printable(job.name), width // 3)
    version = f"  version {job.policy_version}" if job.policy_version is not None else ""
    dtype = f"  {job.dtype}" if job.dtype else ""
    return Text.assemble(
        (name, "bold"),
        "  ",
        (job.state.value, state_style(job.state)),
        f"  iteration {job.next_iteration} of {job.num_iterations}{version}{dtype}",
    )


def bar_line(progress: JobProgress, now: float, width: int) -> Text:
    job = progress.job
    num_cells = min(BAR_WIDTH, width // 4)
    num_full = num_cells * job.next_iteration // job.num_iterations
    left_s = progress.time_left_s()
    elapsed_s = max(0.0, (job.finished_at or now) - (job.started_at or job.queued_at or job.created_at))
    label = "elapsed" if job.started_at is not None else "waiting"
    return Text.assemble(
        ("━" * num_full, "green"),
        ("─" * (num_cells - num_full), "dim"),
        f"  {duration(elapsed_s)} {label}",
        f", about {duration(left_s)} left" if left_s is not None else "",
    )


def rows(progress: JobProgress, width: int, is_broker_lost: bool) -> Iterator[Row]:
    finding = progress.waits_for
    if is_broker_lost:
        yield Row("broker", "does not answer, trying again", "red")
    elif finding is not None:
        style = "red" if finding.is_problem else "yellow"
        yield Row("problem" if finding.is_problem else "doctor", finding.sentence, style, MAX_SENTENCE_LINES)
    if (step := progress.start_step) is not None and not is_broker_lost:
        yield Row("start", step)
    spark_width = min(BAR_WIDTH, max(8, width - LABEL_WIDTH - 37))
    if progress.committed:
        yield from measured_rows(progress, spark_width)
    yield Row("trainer", progress.trainer_doing)
    current = progress.current
    if current is not None:
        unit = "rows" if current.is_supervised else "groups"
        groups = f"{current.num_accepted} of {current.num_groups} {unit}"
        yield Row(
            "tokenised" if current.is_supervised else "generated",
            f"{groups} of iteration {current.iteration} on version {current.policy_version}",
        )


def measured_rows(progress: JobProgress, spark_width: int) -> Iterator[Row]:
    """Yield rows on committed iterations, without values that the job does not have."""
    last = progress.committed[-1]
    rewards = [record.reward_mean for record in progress.committed if record.reward_mean is not None]
    if rewards:
        deviation = f"  std {last.reward_std:.2f}" if last.reward_std is not None else ""
        curve = sparkline(rewards, spark_width)
        yield Row("reward", f"{rewards[-1]:.3f}  {curve}{deviation}  best {max(rewards):.3f}")
    losses = [loss for record in progress.committed if (loss := record.metrics.get("sft/loss")) is not None]
    if losses:
        yield Row("examples", f"loss {losses[-1]:.3f}  {sparkline(losses, spark_width)}")
    scored = progress.scored
    if scored:
        curve = sparkline([record.reward_mean for record in scored if record.reward_mean is not None], spark_width)
        text = f"{number(scored[-1].reward_mean, '.3f')}  {curve}  version {scored[-1].policy_version}"
        yield Row("held out", text)
    tokens_per_s = progress.tokens_per_s()
    speed = [
        ("", tokens_per_s, ".0f", " tokens/s"),
        ("", last.tpspd, ".1f", " tokens/s per device"),
        ("", last.wall_s, ".1f", " s"),
    ]
    idle = [("rollouts ", last.rollout_idle_frac, ".0%", ""), ("trainer ", last.trainer_idle_frac, ".0%", "")]
    for label, parts in ({"speed": speed, "idle": idle} | learning(last)).items():
        if text := join_known(parts):
            yield Row(label, text)


Part = tuple[str, float | None, str, str]  # text before, the value, its format, text after


def join_known(parts: Iterable[Part]) -> str:
    return "  ".join(f"{before}{value:{spec}}{after}" for before, value, spec, after in parts if value is not None)


def learning(record: IterationRecord) -> dict[str, list[Part]]:
    """Return the values that show whether the update is sound."""
    metrics = record.metrics
    staleness = float(record.staleness_max) if record.staleness_max else None
    return {
        "policy": [
            ("KL ", metrics.get("train/kl"), ".4f", ""),
            ("entropy ", metrics.get("train/entropy"), ".3f", ""),
            ("engine against trainer ", record.mismatch_mean, ".4f", " nats"),
            ("off-policy by ", staleness, ".0f", " versions"),
        ],
        "gradient": [
            ("norm ", metrics.get("train/grad_norm"), ".3g", ""),
            ("cosine ", metrics.get("train/grad_cosine"), ".2f", ""),
        ],
        "responses": [
            ("", metrics.get("rollout/response_tokens_mean"), ".1f", " tokens"),
            ("", metrics.get("rollout/truncated_frac"), ".0%", " truncated"),
        ],
    }


def rollouts_row(workers: Sequence[WorkerRecord], now: float) -> Row:
    states = Counter("silent" if is_silent(worker, now) else worker.state for worker in workers)
    counts = ", ".join(f"{count} {state}" for state, count in states.most_common())
    return Row("rollouts", f"{len(workers)}: {counts}" if workers else "none yet")


def heartbeat_time(workers: Iterable[WorkerRecord], now: float) -> float:
    """Return now by the clock of the heartbeats, as far as they show it: this machine's clock may differ by minutes."""
    newest = max((worker.last_seen_at for worker in workers), default=now)
    return min(max(now, newest), newest + NEWEST_HEARTBEAT_S)


def is_silent(worker: WorkerRecord, now: float) -> bool:
    return now - worker.last_seen_at > SILENT_S and not worker.is_starting(now)


def worker_line(worker: WorkerRecord, now: float) -> str:
    parts = [f"{worker.state}: {worker.doing}" if worker.doing else worker.state]
    if is_silent(worker, now):
        parts = [f"silent for {duration(now - worker.last_seen_at)}, was {worker.state}"]
    if worker.policy_version is not None:
        parts.append(f"version {worker.policy_version}")
    if worker.num_in_flight:
        parts.append(f"answering {worker.num_in_flight}")
    if worker.tokens_per_s:
        parts.append(f"{worker.tokens_per_s:.0f} tokens/s")
    return ", ".join(parts)


def state_style(state: JobState) -> str:
    return {JobState.SUCCEEDED: "bold green", JobState.FAILED: "bold red"}.get(state, "yellow")


# ---- plain lines -------------------------------------------------------------------------------------------------


def plain_line(record: IterationRecord, progress: JobProgress) -> str:
    """Return a line on one iteration. Unknown values are left out, or `-` where every job has them."""
    parts = [
        f"iteration {record.iteration + 1}/{progress.job.num_iterations}",
        f"version {record.policy_version}",
        f"loss of examples {number(record.metrics.get('sft/loss'), '.3f')}"
        if record.is_supervised
        else f"reward {number(record.reward_mean, '.3f')}",
        f"{number(num_tokens(record) / record.wall_s if record.wall_s else None, '.0f')} tokens/s",
        f"{number(record.wall_s, '.1f')} s",
        *([] if record.is_supervised else [f"rollouts idle {number(record.rollout_idle_frac, '.0%')}"]),
        f"trainer idle {number(record.trainer_idle_frac, '.0%')}",
        f"{number(record.tpspd, '.1f')} tokens/s per device",
    ]
    parts += [f"{label} {text}" for label, values in learning(record).items() if (text := join_known(values))]
    left_s = progress.time_left_s() if record.iteration + 1 == progress.num_committed else None
    if left_s is not None:
        parts.append(f"about {duration(left_s)} left at {progress.iteration_s():.1f} s an iteration")
    return "  ".join(parts)


def evaluation_line(record: EvaluationRecord) -> str:
    parts = [
        f"evaluation {record.evaluation}",
        f"version {record.policy_version}",
        f"reward {number(record.reward_mean, '.3f')}",
        f"{number(record.response_tokens_mean, '.0f')} tokens",
        f"{number(record.truncated_frac, '.0%')} truncated",
    ]
    if record.pass_at_k is not None:
        parts.insert(3, f"solved {record.pass_at_k:.0%}")
    parts += [f"{name} {reward:.3f}" for name, reward in rewards_of_sets(record.metrics).items()]
    if record.num_failed_groups:
        parts.append(f"{record.num_failed_groups} of {record.num_groups} prompts failed")
    return "  ".join(parts)
