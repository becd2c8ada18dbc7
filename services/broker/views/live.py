"""The messages to those who watch a job while it runs.

Each watcher looks by itself, twice a second, and all at the same moments. What it asks the ledger depends only on what
it has been sent, which is the same for all who keep up: so one of them reads, and the others have its answer.

A look first sends the states (job, iterations) and then the events that led to them. So a watcher that has seen an
event has seen the states that belong to it, and can go on after that event, here or at another broker. States are sent
whole, and sending one twice does no harm; an event is sent once.

A page of events is encoded once for all watchers, and sent in one piece, after which other tasks get a turn: a hundred
watchers that begin with all events of a job hold up no other request.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Hashable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi.sse import format_sse_event
from pydantic import BaseModel
from redis.exceptions import RedisError

from onbeat.contracts.deadlines import STREAM_HEARTBEAT_S
from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.records import IterationUpdate
from onbeat.contracts.states import IterationState, JobState
from onbeat.streams import inspection
from onbeat.streams.inspection import EVENTS_AT_ONCE
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import metrics_point, read_iterations
from services.broker.doctor.diagnosis import diagnose_job
from services.broker.views.records import job_record, place_in_queue

logger = logging.getLogger(__name__)

TICK_S = 0.5
EXPLAIN_S = 5.0
MAX_STREAM_S = 900.0  # then the watcher comes again, with a key that is still in force
PIECE_BYTES = 64 << 10
MAX_READING = 16  # reads from Redis at a time
HEARTBEATS = frozenset({"lease_until", "doing"})  # fields that change all the time and are in no record
# These characters are line ends to Python and text to JSON.
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"})

T = TypeVar("T")


class TooManyWatchers(Exception):
    """The broker takes no more watchers now; the request may succeed later."""


def encode(kind: str, data: BaseModel | str, event_id: str | None = None) -> bytes:
    """Encode a message. `data`: JSON. It stays on one line, also for readers who take U+2028 for the end of one."""
    text = data if isinstance(data, str) else data.model_dump_json()
    return format_sse_event(event=kind, data_str=text.translate(LINE_ENDS), id=event_id)


def end_of(reason: str) -> bytes:
    """Return the last message. `over`: there will be no more; else the watcher may come again, after its last event."""
    return encode("end", f'{{"reason":"{reason}"}}')


# ---- what there is to send -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Position:
    """The point up to which a watcher has been sent everything."""

    cursor: str  # the last event
    first_open: int | None = None  # the first iteration that was not sent as committed; None: no state was sent
    fields: frozenset[tuple[str, str]] = frozenset()  # fields of the job


@dataclass(frozen=True)
class News:
    """The messages between a position and now."""

    states: dict[str, bytes]  # states by subject; empty if nothing has changed
    events: list[bytes]  # pieces of several messages each
    position: Position  # position of a client that has been sent this
    is_over: bool


def pieces(messages: Iterable[bytes]) -> Iterator[bytes]:
    """Join messages until a piece is long enough: to send each by itself would take most of the time."""
    piece = b""
    for message in messages:
        piece += message
        if len(piece) >= PIECE_BYTES:
            yield piece
            piece = b""
    if piece:
        yield piece


async def read_news(ledger: Ledger, job_id: str, at: Position) -> News:
    """Read the events after a position and then the states, which are at least as new. Raises JobNotFound."""
    events, reported = list[bytes](), set[int]()
    cursor, is_all = at.cursor, False
    while not is_all:
        fields, page = await inspection.look(ledger, job_id, cursor)
        events += pieces(encode("event", event, event.id) for event in page)
        reported.update(number for event in page if isinstance(number := event.data.get("iteration"), int))
        cursor, is_all = page[-1].id if page else cursor, len(page) < EVENTS_AT_ONCE
    seen = frozenset((name, value) for name, value in fields.items() if name not in HEARTBEATS)
    state, states, first_open = JobState(fields["state"]), dict[str, bytes](), at.first_open
    if first_open is None:
        first_open = min([max(0, int(fields["next_iteration"]) - 1), *reported])
    if events or seen != at.fields or state is JobState.PENDING:  # the job's place in the queue is no field of the job
        record = job_record(fields)
        await place_in_queue(ledger, [record])
        states["job"] = encode("job", record)
        for iteration in await read_iterations(ledger, job_id, first_open - 1, limit=int(fields["num_opened"])):
            is_done = iteration.state is IterationState.COMMITTED
            update = IterationUpdate(record=iteration, point=metrics_point(iteration) if is_done else {})
            states[f"iteration {iteration.iteration}"] = encode("iteration", update)
            if is_done:
                first_open = iteration.iteration + 1
    return News(states, events, Position(cursor, first_open, seen), state.is_final)


async def read_explanation(ledger: Ledger, job_id: str) -> tuple[bytes, bool]:
    """Return the message of the job's explanation, and whether something waits or is wrong. Raises JobNotFound."""
    explained = await diagnose_job(ledger, job_id)
    return encode("explain", explained), any(finding.waits_for or finding.is_problem for finding in explained.findings)


class Shared:
    """Answers that several watchers ask for at the same time, read once for all of them. Errors are not kept."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, tuple[float, asyncio.Task[Any]]] = {}  # answers, and the times when they expire
        self._reading = asyncio.Semaphore(MAX_READING)

    async def answer(self, question: Hashable, good_s: float, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return the answer to a question, which is read if none is known that is younger than `good_s`."""
        now = time.monotonic()
        for old in [
            key for key, (until, task) in self._answers.items() if task.done() and (until <= now or lost(task))
        ]:
            del self._answers[old]
        if question not in self._answers:
            reading = asyncio.create_task(self._read(read))
            reading.add_done_callback(lost)  # all that wait for it may leave before
            self._answers[question] = now + good_s, reading
        answer: T = await asyncio.shield(self._answers[question][1])  # others wait for it as well
        return answer

    async def _read(self, read: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._reading:
            return await read()

    async def close(self) -> None:
        tasks = [task for _, task in self._answers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def lost(reading: asyncio.Task[Any]) -> bool:
    """Return whether a task that is done has no answer."""
    return reading.cancelled() or reading.exception() is not None


# ---- one watcher -----------------------------------------------------------------------------------------------------


class JobStreams:
    """The streams of one broker."""

    def __init__(self, ledger: Ledger, is_stopping: Callable[[], bool], max_watchers: int) -> None:
        self._ledger, self._is_stopping, self._max_watchers = ledger, is_stopping, max_watchers
        self._num_watchers = 0
        self._shared = Shared()

    async def check(self, job_id: str) -> None:
        """Raise JobNotFound, or TooManyWatchers: other requests need connections as well."""
        await self._shared.answer(("job", job_id), TICK_S / 2, lambda: self._ledger.jobs.state(job_id))
        if self._num_watchers >= self._max_watchers:
            raise TooManyWatchers(f"{self._max_watchers} streams are open, as many as this broker takes")

    async def stream(self, job_id: str, after: str) -> AsyncGenerator[bytes]:
        """Yield the states, the events after the event `after`, and then the news. Ends with the job, with the broker,
        and after MAX_STREAM_S."""
        self._num_watchers += 1
        try:
            async with aclosing(self._messages(job_id, after)) as messages:
                async for message in messages:
                    yield message
        except JobNotFound:  # deleted meanwhile
            yield end_of("over")
        except RedisError as error:
            logger.error("a stream of job %s ends: %s: %s", job_id, type(error).__name__, error)
            yield end_of("broken")
        finally:
            self._num_watchers -= 1

    async def _messages(self, job_id: str, after: str) -> AsyncGenerator[bytes]:
        at, sent = Position(after), dict[str, bytes]()
        renew_at = time.monotonic() + MAX_STREAM_S
        heartbeat_at, explained = time.monotonic() + STREAM_HEARTBEAT_S, b""
        while not self._is_stopping():
            news = await self._shared.answer((job_id, at), TICK_S / 2, partial(read_news, self._ledger, job_id, at))
            states = pieces(state for name, state in news.states.items() if sent.get(name) != state)
            messages = [*states, *news.events]
            at, sent = news.position, news.states or sent
            for message in messages:
                yield message
                await asyncio.sleep(0)
            # The question differs at the end, so that the last explanation is a new one.
            question, read = ("explanation", job_id, news.is_over), partial(read_explanation, self._ledger, job_id)
            explanation, is_waiting = await self._shared.answer(question, EXPLAIN_S, read)
            if explanation != explained and (is_waiting or explained):
                messages.append(explanation)
                yield explanation
            explained = explanation if is_waiting else b""
            now = time.monotonic()
            if news.is_over or now >= renew_at:
                yield end_of("over" if news.is_over else "renew")
                return
            if not messages and now >= heartbeat_at:
                yield b": heartbeat\n\n"
            if messages or now >= heartbeat_at:
                heartbeat_at = now + STREAM_HEARTBEAT_S
            await asyncio.sleep(TICK_S - now % TICK_S)  # all watchers look at the same moments
        yield end_of("stopping")

    async def close(self) -> None:
        await self._shared.close()
