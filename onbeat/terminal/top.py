"""`onbeat top`: the current jobs and rollouts of a broker, in tables that fit a terminal."""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from onbeat.client import AsyncClient
from onbeat.client.active import find_active, newest_iteration
from onbeat.contracts.records import IterationRecord, JobRecord, PoolStatus, WorkerRecord
from onbeat.contracts.states import JobState
from onbeat.terminal.formatting import Column, duration, number, printable, table_lines
from onbeat.terminal.job_view import heartbeat_time, is_silent
from onbeat.terminal.live import LATE_S, live_view, look_until, press_of_q
from onbeat.terminal.report import num_tokens

DEFAULT_POOL = "default"
MAX_MEASURED_JOBS = 20  # jobs whose newest iteration is requested


@dataclass(frozen=True)
class PoolView:
    status: PoolStatus
    workers: Sequence[WorkerRecord]


@dataclass(frozen=True)
class Overview:
    jobs: Sequence[JobRecord]  # jobs that are not over
    newest: dict[str, IterationRecord]  # the last committed iteration by job id
    pools: Sequence[PoolView]

    def as_json(self) -> dict[str, Any]:
        """Return what `onbeat top --json` prints; records are still objects."""
        pools = [pool.status.model_dump(mode="json") | {"workers": pool.workers} for pool in self.pools]
        return {"jobs": self.jobs, "pools": pools}


async def take_overview(client: AsyncClient, only_pool: str | None = None) -> Overview:
    """Return the state of one pool, or of the default pool and those of all jobs that are not over."""
    jobs = [job for job in await find_active(client) if only_pool in (None, job.pool)]
    pools = sorted({job.pool for job in jobs} | {only_pool or DEFAULT_POOL})
    measured = [job for job in jobs if job.next_iteration][:MAX_MEASURED_JOBS]
    newest, views = await asyncio.gather(
        asyncio.gather(*(newest_iteration(client, job) for job in measured)),
        asyncio.gather(*(look_at_pool(client, pool) for pool in pools)),
    )
    return Overview(
        jobs=sorted(jobs, key=lambda job: (job.pool, list(JobState).index(job.state), job.created_at)),
        newest={job.id: record for job, record in zip(measured, newest, strict=True) if record is not None},
        pools=views,
    )


async def look_at_pool(client: AsyncClient, pool: str) -> PoolView:
    status, workers = await asyncio.gather(client.pool(pool), client.workers(pool))
    return PoolView(status, workers)


async def show_top(client: AsyncClient, pool: str | None, console: Console) -> None:
    """Show the tables until q is pressed. Raise BrokerUnreachable when the broker stays away."""
    overview = await take_overview(client, pool)

    async def look() -> None:
        nonlocal overview
        overview = await take_overview(client, pool)

    def redraw(unanswered_s: float) -> None:
        title = f"onbeat top  {client.base_url}  {time.strftime('%H:%M:%S')}  (q ends)"
        draw(TopView(overview, time.time(), title, silence(unanswered_s)))

    with press_of_q() as has_quit, live_view(console, is_full_screen=True) as draw:
        await look_until(has_quit, look, redraw)


def silence(unanswered_s: float) -> str:
    """Return a warning when the last answer is this old; '' while the next one is not late."""
    if unanswered_s < LATE_S:
        return ""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - unanswered_s))
    return f"the broker does not answer since {since} ({unanswered_s:.0f} s), trying again; all below is as of then"


# ---- tables ------------------------------------------------------------------------------------------------------


JOB_COLUMNS = (
    Column("job", 0),
    Column("name", 3),
    Column("pool", 5),
    Column("state", 0),
    Column("iteration", 0, True),
    Column("version", 4, True),
    Column("reward", 1, True),
    Column("tokens/s", 2, True),
)
WORKER_COLUMNS = (
    Column("rollout", 0),
    Column("pool", 5),
    Column("state", 0),
    Column("job", 3),
    Column("version", 2, True),
    Column("answering", 1, True),
    Column("tokens/s", 1, True),
    Column("devices", 4, True),
    Column("seen", 0, True),
)


def job_rows(overview: Overview) -> list[list[str]]:
    rows = []
    for job in overview.jobs:
        last = overview.newest.get(job.id)
        speed = num_tokens(last) / last.wall_s if last is not None and last.wall_s else None
        place = f" ({job.queue_position})" if job.queue_position is not None else ""
        rows.append(
            [
                *(job.id, job.name, job.pool, f"{job.state.value}{place}"),
                f"{job.next_iteration}/{job.num_iterations}",
                number(job.policy_version, "d"),
                number(last.reward_mean if last is not None else None, ".3f"),
                number(speed, ".0f"),
            ]
        )
    return rows


def worker_rows(pool: PoolView, clock: float) -> list[list[str]]:
    """Return a row per rollout, the silent ones first."""
    now = heartbeat_time(pool.workers, clock) if pool.status.num_rollouts else clock  # all heartbeats may have ended
    workers = sorted(pool.workers, key=lambda worker: (not is_silent(worker, now), natural(worker.id)))
    return [
        [
            *(worker.id, pool.status.pool, "silent" if is_silent(worker, now) else worker.state, worker.job_id or "-"),
            number(worker.policy_version, "d"),
            str(worker.num_in_flight),
            number(worker.tokens_per_s, ".0f"),
            str(worker.num_devices),
            duration(max(0.0, now - worker.last_seen_at)),
        ]
        for worker in workers
    ]


def natural(name: str) -> list[str | int]:
    """Return a sort key that puts rollout-2 before rollout-10: text and numbers in turn."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def pool_line(pool: PoolView) -> str:
    status = pool.status
    trainers = count(status.num_trainers, "trainer")
    if status.num_starting_trainers:
        trainers += f" ({status.num_starting_trainers} more starting)" if status.num_trainers else " (one is starting)"
    alive = f"{trainers} and {count(status.num_rollouts, 'rollout')} alive"
    num_answered = max(0, status.num_prompts - status.num_unclaimed_prompts)
    prompts = f"{count(status.num_unclaimed_prompts, 'prompt')} waiting, {num_answered:,} being answered"
    return f"pool {status.pool}: {alive}; {prompts}"


def count(how_many: int, noun: str) -> str:
    return f"{how_many:,} {noun}{'s' * (how_many != 1)}"


def plain_lines(overview: Overview, clock: float) -> Iterator[str]:
    """Yield all tables at full width, for people as well as for `grep` and `awk`."""
    yield from table_lines(JOB_COLUMNS, job_rows(overview))
    rows = [row for pool in overview.pools for row in worker_rows(pool, clock)]
    yield ""
    yield from table_lines(WORKER_COLUMNS, rows)
    yield ""
    for pool in overview.pools:
        yield pool_line(pool)


class TopView:
    """The tables, as far as they fit; rows that do not are counted."""

    def __init__(self, overview: Overview, clock: float, title: str, warning: str = "") -> None:
        self._overview, self._clock, self._title, self._warning = overview, clock, title, warning

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, room = options.max_width, console.height - 1
        head = [Text(self._title, style="bold")]
        head += [Text(self._warning, style="red")] if self._warning else []
        head += [Text(printable(pool_line(pool))) for pool in self._overview.pools]
        jobs = job_rows(self._overview)
        workers = [row for pool in self._overview.pools for row in worker_rows(pool, self._clock)]
        room_for_jobs = max(4, (room - len(head)) // 3, room - len(head) - len(workers) - 4)
        lines = [*head, Text(), *cut_table(JOB_COLUMNS, jobs, "jobs", width, room_for_jobs - 1), Text()]
        lines += cut_table(WORKER_COLUMNS, workers, "rollouts", width, room - len(lines))
        for line in lines[: max(1, room)]:
            line.truncate(width, overflow="ellipsis")
            yield line


def cut_table(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], plural: str, width: int, room: int
) -> Iterator[Text]:
    """Yield the table in at most `room` lines."""
    num_shown = len(rows) if len(rows) < room else max(0, room - 2)
    title, *lines = table_lines(columns, rows[:num_shown], width)
    yield Text(title, style="dim")
    for row, line in zip(rows, lines, strict=False):
        yield Text(line, style="red" if row[2] == "silent" else "")
    if num_shown < len(rows):
        yield Text(f"and {len(rows) - num_shown:,} more {plural}", style="dim")
    elif not rows:
        yield Text(f"no {plural}", style="dim")
