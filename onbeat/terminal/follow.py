"""`onbeat run` and `onbeat jobs watch`: they follow a job on the terminal until it is over."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from rich.console import Console

from onbeat.client import AsyncClient
from onbeat.contracts.records import Event
from onbeat.terminal.formatting import PIPE_WIDTH, printable, shortened, wrapped
from onbeat.terminal.job_progress import JobProgress
from onbeat.terminal.job_view import JobView, evaluation_line, plain_line
from onbeat.terminal.live import LATE_S, can_redraw, live_view, look_until

MAX_NOTICES_OF_A_KIND = 5
MAX_REPEATED = 60  # characters of a notice that comes again
NUMBER = re.compile(r"\d+")
# Events of these kinds are the same if only their numbers differ, as those of an iteration.
NUMBERED_KINDS = frozenset(
    {"checkpoint.failed", "evaluation.failed", "evaluation.missed", "group.failed", "group.stale", "tracker.failed"}
)
# Kinds that need no heading.
TELLING_KINDS = frozenset({"job.dtype", "job.row_tokens", "job.taken_over", "process.ended", "process.silent"})
NOTICE_KINDS = TELLING_KINDS | frozenset(
    {"group.failed", "group.stale", "job.state", "job.warning", "worker.left"}
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


@dataclass(frozen=True)
class Following:
    """The part of its caller in the following of a job."""

    tick: Callable[[], None] = lambda: None  # called about twice a second, and may raise
    cursor: str = "0"  # id of the newest event that is no news
    told_kinds: frozenset[str] = frozenset()  # kinds of events that the caller prints itself


async def follow(client: AsyncClient, job_id: str, console: Console, following: Following = Following()) -> JobProgress:
    """Show the job until it is final.

    Raise BrokerUnreachable when the broker does not come back in time, and ApiError when the job is deleted or a
    request is refused.
    """
    progress = JobProgress(await client.jobs.get(job_id), following.cursor)
    printer = Printer(console, progress, following.told_kinds)
    is_over, is_broker_lost = asyncio.Event(), False

    async def look() -> None:
        await progress.look(client)
        printer.show_news()
        if progress.job.state.is_final:
            is_over.set()

    def redraw(unanswered_s: float) -> None:
        nonlocal is_broker_lost
        following.tick()
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

    def __init__(self, console: Console, progress: JobProgress, told_kinds: frozenset[str] = frozenset()) -> None:
        self._console, self._progress, self._told_kinds = console, progress, told_kinds
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
        if (step := self._progress.start_step) and self._is_new(step):
            self.say(step)
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
        if event.kind not in NOTICE_KINDS - self._told_kinds:
            return
        message = NUMBER.sub("0", event.message) if event.kind in NUMBERED_KINDS else event.message
        heading = "" if event.kind in TELLING_KINDS else f"{event.kind}: "
        if event.kind == "job.state":
            self.say(f"{heading}{event.message}")
        elif num_times := self._num_repeated[event.kind, message]:
            self._num_repeated[event.kind, message] = num_times = num_times + 1
            if num_times.bit_count() == 1:
                self.say(f"{heading}{shortened(printable(event.message), MAX_REPEATED)} ({num_times} times)")
        elif (num_shown := self._num_notices[event.kind]) < MAX_NOTICES_OF_A_KIND:
            self.say(f"{heading}{event.message}")
            self._num_repeated[event.kind, message] = 1
            self._num_notices[event.kind] += 1
        elif num_shown == MAX_NOTICES_OF_A_KIND:
            self.say(f"{event.kind}: more of these are counted, not shown")
            self._num_notices[event.kind] += 1
