"""The timeline of the last iterations: their spans by process, and how much of the time each process was idle."""

import asyncio
from collections.abc import Iterable, Sequence
from functools import lru_cache

from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.intervals import Interval, common_to, share_of
from onbeat.contracts.records import Lane, Span, Timeline
from onbeat.streams.inspection import iteration_hashes, newest_events
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import first_iteration
from services.broker.views.spans import (
    TRAINER,
    commit_before,
    group_spans,
    read_groups,
    read_held,
    trainer_spans,
    weight_spans,
)

MAX_REMEMBERED = 32  # iterations whose groups are not read again


class Timelines:
    """The timelines of all jobs of one broker. Accepted groups never change, so each is read once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # The spans of an iteration's groups, by their entries.
        self._spans_of = lru_cache(MAX_REMEMBERED)(lambda _job_id, _iteration: dict[str, list[Span]]())
        self._reading = asyncio.Lock()

    async def read(self, job_id: str, num_iterations: int) -> Timeline:
        """Return the timeline of the last `num_iterations` that were opened. Raises JobNotFound."""
        job = await self._ledger.jobs.fields(job_id)
        num_opened, now = int(job["num_opened"]), await self._ledger.now()
        start_of_job = first_iteration(job)
        if num_opened == start_of_job:
            return Timeline(start=now, end=now, iterations=[], lanes=[], spans=[])
        shown = range(max(start_of_job, num_opened - num_iterations), num_opened)
        oldest = max(start_of_job, shown[0] - int(job["max_staleness"]))  # older ones reach into the window
        read = range(oldest, num_opened)
        hashes = [iteration_hash.fields for iteration_hash in await iteration_hashes(self._ledger, job_id, read)]
        if not all(hashes):
            raise JobNotFound(job_id)  # deleted meanwhile
        start = float(hashes[shown[0] - read[0]]["opened_at"])
        end = float(hashes[-1].get("committed_at") or job.get("finished_at") or now)
        events = await newest_events(self._ledger, job_id)
        updates = [event for event in events if event.kind == "worker.updated" and event.time > start]
        held = await read_held(self._ledger, job_id, sorted({int(event.data["policy_version"]) for event in updates}))
        spans = weight_spans(updates, held)
        busy: list[Interval] = []  # times that the trainer has reported
        for number, fields in zip(read, hashes, strict=True):
            async with self._reading:
                spans += await self._group_spans(job_id, number, float(fields["opened_at"]))
            reported = trainer_spans(number, fields)
            spans += reported
            if reported:
                busy.append((commit_before(fields), float(fields["committed_at"])))
        return await asyncio.to_thread(put_together, start, end, list(shown), spans, busy)

    async def _group_spans(self, job_id: str, iteration: int, opened_at: float) -> list[Span]:
        """Return the spans of the accepted groups, as far as they are still kept."""
        spans = self._spans_of(job_id, iteration)
        for entry, group in (await read_groups(self._ledger, job_id, iteration, spans)).items():
            spans_of_group = group_spans(group, opened_at) if group else []
            spans[entry] = [span for span in spans_of_group if span.end > span.start]
        return [span for of_group in spans.values() for span in of_group]


def put_together(
    start: float, end: float, iterations: list[int], spans: Sequence[Span], busy: Sequence[Interval]
) -> Timeline:
    """Build the timeline. `busy`: the times that the trainer's spans cover."""
    shown: list[Interval] = [(start, end)]
    seen = sorted((s for s in spans if s.end > start and s.start < end), key=lambda span: (span.start, span.lane))
    rollouts = sorted({span.lane for span in seen} - {TRAINER})
    working = intervals_of(span for span in seen if span.lane == TRAINER and span.kind != "wait")
    work = share_of(working, common_to(busy, shown))
    lanes = [Lane(id=TRAINER, idle_frac=None if work is None else 1 - work)]
    for worker in rollouts:
        generating = intervals_of(span for span in seen if span.lane == worker and span.kind == "generate")
        lanes.append(Lane(id=worker, idle_frac=1 - (share_of(generating, shown) or 0.0)))
    generating, training = (intervals_of(s for s in seen if s.kind == kind) for kind in ("generate", "micro_batch"))
    both_work = common_to(common_to(generating, training), shown)
    return Timeline(start=start, end=end, iterations=iterations, lanes=lanes, spans=seen, both_work=both_work)


def intervals_of(spans: Iterable[Span]) -> list[Interval]:
    return [(span.start, span.end) for span in spans]
