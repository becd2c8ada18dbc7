"""The timeline of the last iterations, by process, put together from data that the ledger has anyway.

    generate, score   a group's durations, laid backwards from the moment of its acceptance: the id of its entry
    pull, load        a rollout's durations, backwards from the event that it serves the version
    the trainer       its own spans, stored with the commit; "wait" is the time between them

All moments are by the Redis clock, so that lanes of different machines fit together.
"""

import asyncio
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from onbeat.errors import JobNotFound
from onbeat.streams.codec import RolloutGroup, decode_group
from onbeat.streams.inspection import iteration_hashes, newest_events
from onbeat.streams.ledger import Ledger
from onbeat.streams.records import first_iteration
from onbeat.types import Event, Lane, Span, Timeline

TRAINER = "trainer"
MIN_WAIT_S = 0.005  # shorter waits are the loop's own time between two steps
MAX_GROUPS = 1000  # per iteration: the first ones
MAX_REMEMBERED = 32  # iterations whose groups are not read again

Fields = dict[str, str]


@dataclass
class Groups:
    """The spans of an iteration's groups, as far as they have been read."""

    cursor: str = "-"  # entry of the rollouts stream
    num_groups: int = 0
    spans: list[Span] = field(default_factory=list)


class Timelines:
    """The timelines of all jobs of one broker. Accepted groups never change, so each is read once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._groups: OrderedDict[tuple[str, int], Groups] = OrderedDict()
        self._reading = asyncio.Lock()

    async def read(self, job_id: str, num_iterations: int) -> Timeline:
        """Return the timeline of the last `num_iterations` that were opened. Raises JobNotFound."""
        job = await self._ledger.jobs.fields(job_id)
        num_opened, now = int(job["num_opened"]), await self._ledger.now()
        start_of_job = first_iteration(job)
        if num_opened == start_of_job:
            return Timeline(start=now, end=now, iterations=[], lanes=[], spans=[])
        shown = range(max(start_of_job, num_opened - num_iterations), num_opened)
        read = range(
            max(start_of_job, shown[0] - int(job["max_staleness"])), num_opened
        )  # older ones reach into the window
        hashes = [each.fields for each in await iteration_hashes(self._ledger, job_id, read)]
        if not all(hashes):
            raise JobNotFound(job_id)  # deleted meanwhile
        start = float(hashes[shown[0] - read[0]]["opened_at"])
        end = float(hashes[-1].get("committed_at") or job.get("finished_at") or now)
        spans = weight_spans(await newest_events(self._ledger, job_id), await self._held(job_id, hashes))
        busy: list[tuple[float, float]] = []  # times that the trainer has reported
        for number, fields in zip(read, hashes, strict=True):
            async with self._reading:
                spans += await self._group_spans(job_id, number)
            told = trainer_spans(number, fields)
            spans += told
            if told:
                busy.append((commit_before(fields), float(fields["committed_at"])))
        return await asyncio.to_thread(put_together, start, end, list(shown), spans, busy)

    async def _held(self, job_id: str, hashes: Iterable[Fields]) -> dict[tuple[int, str], float]:
        """Return by (policy version, rollout) how long weights lay there before the engine served them, in seconds."""
        found: dict[tuple[int, str], float] = {}
        for version in sorted({int(fields["policy_version"]) for fields in hashes}):
            if (record := await self._ledger.versions.weights(job_id, version)) is not None:
                held = ((worker, update.held_s) for worker, update in record.rollouts.items())
                found |= {(version, worker): held_s for worker, held_s in held if held_s is not None}
        return found

    async def _group_spans(self, job_id: str, iteration: int) -> list[Span]:
        """Return the spans of the accepted groups, as far as they are still kept."""
        groups = self._groups.setdefault((job_id, iteration), Groups())
        self._groups.move_to_end((job_id, iteration))
        while len(self._groups) > MAX_REMEMBERED:
            self._groups.popitem(last=False)
        states = (await self._ledger.iterations.groups(job_id, iteration)).values()
        accepted = {state.removeprefix("accepted:") for state in states if state.startswith("accepted:")}
        wanted = {entry for entry in accepted if order(entry) > order(groups.cursor)}
        newest = max(accepted, key=order, default="-")
        while wanted and groups.num_groups < MAX_GROUPS:
            first = min(wanted, key=order)
            found = await self._ledger.audit_log.rollouts(job_id, before(first))
            for entry, payload in found:
                if entry in wanted:
                    groups.num_groups += 1
                    groups.spans += group_spans(decode_group(payload), accepted_at=order(entry)[0] / 1000)
            read_to = found[-1][0] if found else max(wanted, key=order)  # else they are no longer kept
            wanted = {entry for entry in wanted if order(entry) > order(read_to)}
            # The cursor stays at or before `newest`: groups accepted between the two reads are left to the next call.
            groups.cursor = max(groups.cursor, min(read_to, newest, key=order), key=order)
        return groups.spans


def order(entry: str) -> tuple[int, int]:
    """Return milliseconds and number of a stream entry's id. `-` comes before all."""
    if entry == "-":
        return 0, 0
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def before(entry: str) -> str:
    """Return the largest id below this one."""
    milliseconds, number = order(entry)
    return f"{milliseconds}-{number - 1}" if number else f"{milliseconds - 1}-18446744073709551615"


# ---- where spans come from ---------------------------------------------------------------------------------------


def group_spans(group: RolloutGroup, accepted_at: float) -> Iterator[Span]:
    """Yield the spans of a group; none if it failed before anything was generated."""
    generated_at = accepted_at - group.timings.score_s
    kinds = {
        "generate": (generated_at - group.timings.generate_s, generated_at),
        "score": (generated_at, accepted_at),
    }
    for kind, (start, end) in kinds.items():
        if end > start:
            about = {"iteration": group.iteration, "group_id": group.group_id}
            yield Span(lane=group.worker_id, kind=kind, start=start, end=end, **about)


def weight_spans(events: Iterable[Event], held: dict[tuple[int, str], float]) -> list[Span]:
    """Return the load spans of all updates, and the pull spans of those in `held`."""
    spans = []
    for event in events:
        if event.kind != "worker.updated":
            continue
        worker, version = str(event.data["worker_id"]), int(event.data["policy_version"])
        load_s, pull_s = float(event.data["load_s"]), float(event.data["pull_s"])
        spans.append(Span(lane=worker, kind="load", start=event.time - load_s, end=event.time, iteration=version))
        if (held_s := held.get((version, worker))) is not None:
            pulled_at = event.time - held_s
            spans.append(Span(lane=worker, kind="pull", start=pulled_at - pull_s, end=pulled_at, iteration=version))
    return spans


def commit_before(fields: Fields) -> float:
    return float(fields.get("previous_commit_at") or fields["opened_at"])


def trainer_spans(iteration: int, fields: Fields) -> list[Span]:
    """Return the trainer's spans from the previous commit to this one; [] before this commit or if it reports none."""
    told = json.loads(fields.get("metrics", "{}")).get("spans", [])
    work = [
        Span(lane=TRAINER, kind=kind, start=start, end=start + took_s, iteration=iteration)
        for kind, start, took_s in told
    ]
    if not work:
        return []
    moments = [commit_before(fields), *(moment for span in work for moment in (span.start, span.end))]
    waits = [
        Span(lane=TRAINER, kind="wait", start=since, end=until, iteration=iteration)
        for since, until in list(pairwise(moments))[::2]
        if until - since >= MIN_WAIT_S
    ]
    return [*work, *waits]


# ---- together ----------------------------------------------------------------------------------------------------


def put_together(
    start: float, end: float, iterations: list[int], spans: Sequence[Span], told: Sequence[tuple[float, float]]
) -> Timeline:
    """Build the timeline. `told`: the times that the trainer's spans cover."""
    seen = sorted((s for s in spans if s.end > start and s.start < end), key=lambda span: (span.start, span.lane))
    rollouts = sorted({span.lane for span in seen} - {TRAINER})
    trainer_s = covered_s(told, start, end)
    work = covered_s([(s.start, s.end) for s in seen if s.lane == TRAINER and s.kind != "wait"], start, end)
    lanes = [Lane(id=TRAINER, idle_frac=max(0.0, 1 - work / trainer_s) if trainer_s else None)]
    for worker in rollouts:
        generating = [(s.start, s.end) for s in seen if s.lane == worker and s.kind == "generate"]
        lanes.append(Lane(id=worker, idle_frac=1 - covered_s(generating, start, end) / (end - start)))
    return Timeline(start=start, end=end, iterations=iterations, lanes=lanes, spans=seen)


def covered_s(spans: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return the seconds of a window in which at least one of the spans runs.

    >>> covered_s([(0, 2), (1, 3), (5, 9)], start=1, end=6)
    3.0
    """
    total, until = 0.0, start
    for since, to in sorted(spans):
        total += max(0.0, min(to, end) - max(since, until))
        until = max(until, to)
    return total
