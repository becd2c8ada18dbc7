"""The messages to watchers of a job while it runs. One reader per watched job, whatever the number of its watchers.

    Redis --one read per tick--> JobWatch --message--> queue of each watcher --> its connection

A tick first sends the states (job, iterations) and then the events that led to them. So a watcher that has seen an
event has seen the states that belong to it, and can go on after that event: from the ledger up to where the reader is,
then from the queue. States are sent whole, and sending one twice does no harm; an event is sent once.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fastapi.sse import format_sse_event
from pydantic import BaseModel
from redis.exceptions import RedisError

from onbeat.errors import JobNotFound
from onbeat.streams import inspection
from onbeat.streams.inspection import EVENTS_AT_ONCE
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import Fields, metrics_point, read_iterations
from onbeat.streams.stream_ids import order
from onbeat.types import Diagnosis, Event, IterationState, IterationUpdate, JobRecord, JobState
from services.broker.doctor import diagnosis
from services.broker.explain import explain_job
from services.broker.records import job_record, place_in_queue

logger = logging.getLogger(__name__)

TICK_S = 0.5
EXPLAIN_S = 5.0
HEARTBEAT_S = 15.0
MAX_WAITING = 256  # messages that a watcher has not taken when the next ones come; then it is dropped
MAX_STREAM_S = 900.0  # then the watcher comes again, with a key that is still in force
ITERATIONS_AT_ONCE = 1000  # iterations that are read at a time
MAX_ARRIVING = 16  # watchers that read from Redis at a time, as they come
HEARTBEATS = frozenset({"lease_until", "doing"})  # fields that change all the time and are in no record
# These characters are line ends to Python and text to JSON.
LINE_ENDS = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"})


class TooManyWatchers(Exception):
    """The broker takes no more watchers now; the request may succeed later."""


@dataclass(frozen=True)
class Message:
    body: bytes
    event_id: str = ""  # '' of a state


def encode(kind: str, data: BaseModel | str, event_id: str = "") -> Message:
    """Encode a message. `data`: JSON. It stays on one line, also for readers who take U+2028 for the end of one."""
    text = data if isinstance(data, str) else data.model_dump_json()
    return Message(format_sse_event(event=kind, data_str=text.translate(LINE_ENDS), id=event_id or None), event_id)


def end_of(reason: str) -> Message:
    """Return the last message. `over`: there will be no more; else the watcher may come again, after its last event."""
    return encode("end", f'{{"reason":"{reason}"}}')


def encode_event(event: Event) -> Message:
    return encode("event", event, event.id)


class Watcher:
    """The messages that wait for one connection."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Message | None] = asyncio.Queue()  # None: the end
        self.is_dropped = False

    def send(self, messages: Sequence[Message]) -> None:
        """Queue the messages of a tick. A watcher that took the earlier ones is not slow, however many come at once."""
        if messages and self.queue.qsize() >= MAX_WAITING:
            self.is_dropped = True
        if not self.is_dropped:
            for message in messages:
                self.queue.put_nowait(message)

    def send_end(self, reason: str) -> None:
        if not self.is_dropped:
            self.queue.put_nowait(end_of(reason))
            self.queue.put_nowait(None)


class JobWatch:
    """The reader of one job for all of its watchers, until it is over."""

    def __init__(self, ledger: Ledger, job_id: str, is_stopping: Callable[[], bool]) -> None:
        self._ledger, self._job_id, self._is_stopping = ledger, job_id, is_stopping
        self.watchers: set[Watcher] = set()
        self.cursor = "0"  # the event that was sent last; before the first tick: the newest one
        self.first_open = 0  # the first iteration that was not sent as committed
        self.explained: Message | None = None  # the last time, if something waits
        self._sent: dict[str, bytes] = {}  # by job or iteration: the last state that was sent
        self._fields: Fields = {}
        self._explain_at = 0.0
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        reason = "broken"  # by an error that is not foreseen here
        try:
            while not self._is_stopping():
                if await self._tick():
                    reason = "over"
                    break
                await asyncio.sleep(TICK_S)
            else:
                reason = "stopping"
        except JobNotFound:
            reason = "over"
        except RedisError as error:
            logger.error("job %s is not watched any more: %s: %s", self._job_id, type(error).__name__, error)
        except asyncio.CancelledError:
            reason = "stopping"
            raise
        finally:
            for watcher in self.watchers:
                watcher.send_end(reason)

    async def start(self) -> None:
        """Stand at the newest event and the first iteration that is not committed. Raises JobNotFound."""
        fields = await self._ledger.jobs.fields(self._job_id)
        newest = await inspection.newest_events(self._ledger, self._job_id, count=1)
        self.cursor = newest[0].id if newest else "0"
        self.first_open = int(fields["next_iteration"])

    async def _tick(self) -> bool:
        """Send the news to all watchers. Return whether the job is over."""
        fields, events = await inspection.look(self._ledger, self._job_id, self.cursor)
        fields = {name: value for name, value in fields.items() if name not in HEARTBEATS}
        messages: list[Message] = []
        is_due = time.monotonic() >= self._explain_at
        if events or fields != self._fields or is_due:
            messages += self._news("job", encode("job", await read_record(self._ledger, fields)))
            messages += await self._iterations(fields)
            self._fields = fields
        messages += [encode_event(event) for event in events]
        is_over = JobState(fields["state"]).is_final and len(events) < EVENTS_AT_ONCE
        if is_due or is_over:
            self._explain_at = time.monotonic() + EXPLAIN_S
            messages += await self._explanation()
        for watcher in self.watchers:
            watcher.send(messages)
        if events:  # in one go with sending them: a watcher that joins counts from here
            self.cursor = events[-1].id
        return is_over

    def _news(self, what: str, message: Message) -> list[Message]:
        """Return the message, or nothing when it was the last one sent about `what`."""
        if self._sent.get(what) == message.body:
            return []
        self._sent[what] = message.body
        return [message]

    async def _iterations(self, fields: Fields) -> list[Message]:
        """Return the iterations that have changed. A committed one does not change any more."""
        messages: list[Message] = []
        if int(fields["num_opened"]) > self.first_open:
            for update in await read_updates(self._ledger, self._job_id, self.first_open):
                name = f"iteration {update.record.iteration}"
                messages += self._news(name, encode("iteration", update))
                if update.record.state is IterationState.COMMITTED:
                    del self._sent[name]
                    self.first_open = update.record.iteration + 1
        return messages

    async def _explanation(self) -> list[Message]:
        """Return an explanation while something waits, and once more when nothing does."""
        found: Diagnosis = diagnosis(await explain_job(self._ledger, self._job_id))
        is_waiting = any(finding.waits_for or finding.is_problem for finding in found.findings)
        message, before = encode("explain", found), self.explained
        self.explained = message if is_waiting else None
        return [message] if is_waiting or before is not None else []


async def read_record(ledger: Ledger, fields: Fields) -> JobRecord:
    """Return the job's record with its place in the queue."""
    record = job_record(fields)
    await place_in_queue(ledger, [record])
    return record


async def read_updates(ledger: Ledger, job_id: str, first: int) -> list[IterationUpdate]:
    """Return the updates from iteration `first` to the newest."""
    updates: list[IterationUpdate] = []
    while True:
        records = await read_iterations(ledger, job_id, first - 1, ITERATIONS_AT_ONCE)
        for record in records:
            is_done = record.state is IterationState.COMMITTED
            updates.append(IterationUpdate(record=record, point=metrics_point(record) if is_done else {}))
        if len(records) < ITERATIONS_AT_ONCE:
            return updates
        first += ITERATIONS_AT_ONCE


class JobStreams:
    """The watches of one broker, each kept while a client watches."""

    def __init__(self, ledger: Ledger, is_stopping: Callable[[], bool], max_watchers: int) -> None:
        self._ledger, self._is_stopping, self._max_watchers = ledger, is_stopping, max_watchers
        self._watches: dict[str, JobWatch] = {}
        self._num_watchers = 0
        self._arriving = asyncio.Semaphore(MAX_ARRIVING)

    async def check(self, job_id: str) -> None:
        """Raise JobNotFound, or TooManyWatchers: other requests need connections as well."""
        async with self._arriving:
            await self._ledger.jobs.state(job_id)
        if self._num_watchers >= self._max_watchers:
            raise TooManyWatchers(f"{self._max_watchers} streams are open, as many as this broker takes")

    async def stream(self, job_id: str, after: str) -> AsyncGenerator[bytes]:
        """Yield the states, the events after the event `after`, and then the news. Ends with the job, with the broker,
        after MAX_STREAM_S, and when the watcher is too slow."""
        watcher = Watcher()
        self._num_watchers += 1
        try:
            async with self._arriving:
                watch = await self._join(job_id, watcher)
                past = await missed(self._ledger, job_id, after, watch.cursor, watch.first_open)
            async with aclosing(messages_for(past, watch, watcher, after)) as messages:
                async for message in messages:
                    yield message.body
        except JobNotFound:  # deleted meanwhile
            yield end_of("over").body
        except RedisError as error:
            logger.error("a stream of job %s ends: %s: %s", job_id, type(error).__name__, error)
            yield end_of("broken").body
        finally:
            self._num_watchers -= 1
            self._leave(job_id, watcher)

    async def _join(self, job_id: str, watcher: Watcher) -> JobWatch:
        """Add a watcher to the job's reader, which is started for the first one. Raises JobNotFound."""
        watch = self._watches.get(job_id)
        if watch is None:
            begun = JobWatch(self._ledger, job_id, self._is_stopping)
            await begun.start()
            watch = self._watches.setdefault(job_id, begun)  # another watcher may have been faster
        watch.watchers.add(watcher)
        if watch.task is None:
            watch.task = asyncio.create_task(self._run(job_id, watch), name=f"watch {job_id}")
            watch.task.add_done_callback(log_crash)
        return watch

    async def _run(self, job_id: str, watch: JobWatch) -> None:
        try:
            await watch.run()
        finally:  # in one go with the last message: no watcher joins what is over
            self._forget(job_id, watch)

    def _leave(self, job_id: str, watcher: Watcher) -> None:
        watch = self._watches.get(job_id)
        if watch is not None:
            watch.watchers.discard(watcher)
            if not watch.watchers and watch.task is not None:
                watch.task.cancel()
                self._forget(job_id, watch)

    def _forget(self, job_id: str, watch: JobWatch) -> None:
        if self._watches.get(job_id) is watch:
            del self._watches[job_id]

    async def close(self) -> None:
        tasks = [watch.task for watch in self._watches.values() if watch.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s: crashed", task.get_name(), exc_info=error)


async def messages_for(past: list[Message], watch: JobWatch, watcher: Watcher, after: str) -> AsyncGenerator[Message]:
    """Yield the messages for one watcher: what it missed until it joined, and then what its queue holds."""
    deadline = time.monotonic() + MAX_STREAM_S
    last = after
    for each in past:
        yield each
        last = each.event_id or last
    if watch.explained is not None:
        yield watch.explained
    while not watcher.is_dropped:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            yield end_of("renew")
            return
        try:
            async with asyncio.timeout(min(HEARTBEAT_S, left_s)):
                message = await watcher.queue.get()
        except TimeoutError:
            yield Message(b": heartbeat\n\n")
            continue
        if message is None:
            return
        if message.event_id:
            if order(message.event_id) <= order(last):  # seen by way of another broker, which was ahead of this one
                continue
            last = message.event_id
        yield message
    yield end_of("slow")


async def missed(ledger: Ledger, job_id: str, after: str, until: str, first_open: int) -> list[Message]:
    """Return the states as they are, including the iterations that the events are about, and then the events."""
    events = [event async for event in events_between(ledger, job_id, after, until)]
    mentioned = [number for event in events if isinstance(number := event.data.get("iteration"), int)]
    record = await read_record(ledger, await ledger.jobs.fields(job_id))
    updates = await read_updates(ledger, job_id, min([max(0, first_open - 1), *mentioned]))
    states = [encode("job", record), *(encode("iteration", update) for update in updates)]
    return states + [encode_event(event) for event in events]


async def events_between(ledger: Ledger, job_id: str, after: str, until: str) -> AsyncIterator[Event]:
    while order(after) < order(until):
        events = await ledger.event_log.read(job_id, after, count=EVENTS_AT_ONCE)
        for event in events:
            if order(event.id) > order(until):
                return
            yield event
        if not events:
            return
        after = events[-1].id
