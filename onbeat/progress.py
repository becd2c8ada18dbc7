"""Following a job in a terminal: what is known of it, and how that is kept up to date from its stream."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from onbeat.client import AsyncClient, BrokerUnreachable, Update
from onbeat.formatting import printable
from onbeat.job_progress import JobProgress
from onbeat.job_view import JobView, evaluation_line, plain_line
from onbeat.types import Diagnosis, Event, IterationRecord, IterationState, IterationUpdate

POLL_S = 0.5  # between two looks at the screen and at the services of `onbeat run`
ROLLOUTS_S = 2.0  # between two questions for the rollouts, which are not in the stream
MAX_LOST_STREAMS = 3  # in a row, each of which gives up after 24 s or more: a broker may restart
MAX_NOTICES_OF_A_KIND = 5
NOTICE_KINDS = frozenset(
    {"group.failed", "group.stale", "job.taken_over", "worker.lost", "worker.left", "job.state", "job.warning"}
    | {"evaluation.failed", "checkpoint.failed"}
)


async def follow(
    client: AsyncClient, job_id: str, console: Console, tick: Callable[[], None] = lambda: None
) -> JobProgress:
    """Show the job until it is final. `tick` is called about twice a second and may raise.

    Raises BrokerUnreachable when the broker does not come back in time, and ApiError when the job is deleted or a
    question refused.
    """
    progress = await JobProgress.load(client, job_id)
    printer = Printer(console, progress)
    with live_view(progress, console) if can_redraw(console) else plain_view() as refresh:
        listening = asyncio.create_task(listen(client, progress, printer))
        looking = asyncio.create_task(look_at_rollouts(client, progress, printer))
        try:
            done: set[asyncio.Task[None]] = set()
            while not done:
                tick()
                refresh()
                done, _ = await asyncio.wait([listening, looking], timeout=POLL_S, return_when="FIRST_COMPLETED")
            for task in done:
                task.result()
        finally:
            listening.cancel()
            looking.cancel()
            await asyncio.gather(listening, looking, return_exceptions=True)
    await progress.finish(client)
    printer.show_evaluations()  # the last one may have been scored after the last event
    return progress


async def listen(client: AsyncClient, progress: JobProgress, printer: "Printer") -> None:
    """Until the job is over."""
    num_lost, is_behind = 0, False
    for record in progress.committed:
        printer.show_iteration(record)
    printer.show_evaluations()
    while True:
        try:
            async with aclosing(client.jobs.stream(progress.job.id, progress.cursor)) as updates:
                async for update in updates:
                    num_lost = 0
                    progress.apply(update)
                    if is_behind or (isinstance(update, Event) and update.kind.startswith("evaluation.")):
                        is_behind = not await catch_up(client, progress)
                        printer.show_evaluations()
                    printer.show(update)
            return
        except BrokerUnreachable:
            num_lost += 1
            if num_lost == MAX_LOST_STREAMS:
                raise


async def catch_up(client: AsyncClient, progress: JobProgress) -> bool:
    """Are the evaluations known? If not, the stream's next update, after it was lost too, is the time to ask again."""
    try:
        await progress.load_evaluations(client)
    except BrokerUnreachable:
        return False
    return True


async def look_at_rollouts(client: AsyncClient, progress: JobProgress, printer: "Printer") -> None:
    """For ever. Also tells whether the broker answers: the stream looks for it by itself, and says nothing."""
    while True:
        try:
            progress.workers = await client.workers(progress.job.pool)
            is_lost = False
        except BrokerUnreachable:
            is_lost = True
        if is_lost != progress.is_broker_lost:
            progress.is_broker_lost = is_lost
            printer.say("the broker does not answer, trying again" if is_lost else "the broker answers again")
        await asyncio.sleep(ROLLOUTS_S)


class Printer:
    """Lines that stay on the terminal: notices always; without a live view also what that would show."""

    def __init__(self, console: Console, progress: JobProgress) -> None:
        self._console, self._progress = console, progress
        self._is_live = can_redraw(console)
        self._notices = Notices(self.say)
        self._iterations: set[int] = set()  # that were shown
        self._evaluations: set[int] = set()
        self._findings: set[tuple[str, str]] = set()

    def say(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)

    def show(self, update: Update) -> None:
        match update:
            case Event():
                self._notices.show([update])
            case Diagnosis():
                self.show_finding()
            case IterationUpdate():
                self.show_iteration(update.record)

    def show_iteration(self, record: IterationRecord) -> None:
        is_due = record.state is IterationState.COMMITTED and record.iteration not in self._iterations
        if is_due and not self._is_live:
            self._iterations.add(record.iteration)
            self.say(plain_line(record, self._progress))

    def show_evaluations(self) -> None:
        for record in self._progress.scored if not self._is_live else []:
            if record.evaluation not in self._evaluations:
                self._evaluations.add(record.evaluation)
                self.say(evaluation_line(record))

    def show_finding(self) -> None:
        """Each once: its seconds change all the time."""
        finding = self._progress.waits_for
        if finding is not None and not self._is_live and (finding.who, finding.waits_for) not in self._findings:
            self._findings.add((finding.who, finding.waits_for))
            self.say(f"doctor: {finding.sentence}")


class Notices:
    """Events that a person should see, a bounded number of each kind."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._counts: dict[str, int] = {}

    def show(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.kind not in NOTICE_KINDS:
                continue
            count = self._counts[event.kind] = self._counts.get(event.kind, 0) + 1
            if event.kind == "job.state" or count <= MAX_NOTICES_OF_A_KIND:
                self._say(f"{event.kind}: {event.message}")
            elif count == MAX_NOTICES_OF_A_KIND + 1:
                self._say(f"{event.kind}: more of these are counted, not shown")


def can_redraw(console: Console) -> bool:
    """No pipe, also where colours are forced, and no terminal that cannot move its cursor."""
    return console.is_interactive and console.file.isatty()


@contextmanager
def plain_view() -> Iterator[Callable[[], None]]:
    yield lambda: None


@contextmanager
def live_view(progress: JobProgress, console: Console) -> Iterator[Callable[[], None]]:
    """What to call to draw again. Leaves the terminal as it was."""

    def render() -> JobView:
        return JobView(progress, time.time())

    with Live(get_renderable=render, console=console, auto_refresh=False, transient=True) as live:
        size = console.size

        def refresh() -> None:
            nonlocal size
            if console.size != size:  # what was drawn has other line breaks now
                size = console.size
                console.clear()
            live.refresh()

        yield refresh
