"""`onbeat run` and `onbeat jobs watch`: they follow a job on the terminal until it is over."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable

from rich.console import Console

from onbeat.client import AsyncClient
from onbeat.contracts.records import Event
from onbeat.terminal.formatting import printable, shortened, wrapped
from onbeat.terminal.job_progress import JobProgress
from onbeat.terminal.job_view import JobView, evaluation_line, plain_line
from onbeat.terminal.live import LATE_S, can_redraw, live_view, look_until

MAX_NOTICES_OF_A_KIND = 5
PIPE_WIDTH = 120  # characters of a line that is not for a terminal; only a longer word makes it longer
MAX_REPEATED = 60  # characters of a notice that comes again
NUMBER = re.compile(r"\d+")
# Events of these kinds are the same if only their numbers differ, as those of an iteration.
NUMBERED_KINDS = frozenset(
    {"checkpoint.failed", "evaluation.failed", "evaluation.missed", "group.failed", "group.stale", "tracker.failed"}
)
NOTICE_KINDS = frozenset(
    {"group.failed", "group.stale", "job.taken_over", "job.state", "job.warning", "job.dtype", "worker.left"}
    | {
        "worker.failed",
        "worker.lost",
        "worker.model_failed",
        "trainer.failed",
        "trainer.stalled",
        "tracker.failed",
        "checkpoint.failed",
    }
    | {"evaluation.failed", "evaluation.missed"}
)


async def follow(
    client: AsyncClient, job_id: str, console: Console, tick: Callable[[], None] = lambda: None
) -> JobProgress:
    """Show the job until it is final. `tick` is called about twice a second and may raise.

    Raise BrokerUnreachable when the broker does not come back in time, and ApiError when the job is deleted or a
    request is refused.
    """
    progress = JobProgress(await client.jobs.get(job_id))
    printer = Printer(console, progress)
    is_over, is_broker_lost = asyncio.Event(), False

    async def look() -> None:
        await progress.look(client)
        printer.show_news()
        if progress.job.state.is_final:
            is_over.set()

    def redraw(unanswered_s: float) -> None:
        nonlocal is_broker_lost
        tick()
        if (unanswered_s > LATE_S) != is_broker_lost:
            is_broker_lost = not is_broker_lost
            printer.say("the broker does not answer, trying again" if is_broker_lost else "the broker answers again")
        draw(JobView(progress, time.time(), is_broker_lost))

    with live_view(console) as draw:
        await look()
        await look_until(is_over, look, redraw)
    return progress


class Printer:
    """The lines that stay on the terminal: notices always; without a live view also the content of that view."""

    def __init__(self, console: Console, progress: JobProgress) -> None:
        self._console, self._progress = console, progress
        self._is_live = can_redraw(console)
        self._num_notices: Counter[str] = Counter()  # counts of different ones by kind
        self._num_repeated: Counter[tuple[str, str]] = Counter()  # counts of those that were shown, by kind and message
        self._said: set[Hashable] = set()

    def say(self, line: str) -> None:
        text = printable(line)
        for part in [text] if self._is_live else wrapped(text, PIPE_WIDTH):
            self._console.out(part)

    def show_news(self) -> None:
        """Print what is new since the last call."""
        for event in self._progress.news:
            self._notice(event)
        self._progress.news.clear()
        if self._is_live:
            return
        for worker in self._progress.starting:
            if self._is_new(worker.id, worker.doing):
                self.say(f"{worker.id}: {worker.doing}")
        for record in self._progress.committed:
            if self._is_new("iteration", record.iteration):
                self.say(plain_line(record, self._progress))
        for scored in self._progress.scored:
            if self._is_new("evaluation", scored.evaluation):
                self.say(evaluation_line(scored))
        finding = self._progress.waits_for
        # The seconds in the sentence change all the time.
        if finding is not None and self._is_new(finding.who, finding.waits_for, finding.key):
            self.say(f"doctor: {finding.sentence}")

    def _is_new(self, *key: Hashable) -> bool:
        is_new = key not in self._said
        self._said.add(key)
        return is_new

    def _notice(self, event: Event) -> None:
        """Print an event that a person should see; of each kind a bounded number, but all changes of the state.

        An event that comes again is counted: it is printed the first, second, fourth, eighth, ... time.
        """
        if event.kind not in NOTICE_KINDS:
            return
        message = NUMBER.sub("0", event.message) if event.kind in NUMBERED_KINDS else event.message
        if event.kind == "job.state":
            self.say(f"{event.kind}: {event.message}")
        elif num_times := self._num_repeated[event.kind, message]:
            self._num_repeated[event.kind, message] = num_times = num_times + 1
            if num_times.bit_count() == 1:
                self.say(f"{event.kind}: {shortened(printable(event.message), MAX_REPEATED)} ({num_times} times)")
        elif (num_shown := self._num_notices[event.kind]) < MAX_NOTICES_OF_A_KIND:
            self.say(f"{event.kind}: {event.message}")
            self._num_repeated[event.kind, message] = 1
            self._num_notices[event.kind] += 1
        elif num_shown == MAX_NOTICES_OF_A_KIND:
            self.say(f"{event.kind}: more of these are counted, not shown")
            self._num_notices[event.kind] += 1
