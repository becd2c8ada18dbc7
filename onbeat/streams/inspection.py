"""Views for people of the streams behind a job: leases, lengths, events. Nothing here decides anything or writes."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pydantic_core import from_json

from onbeat.contracts.errors import JobNotFound
from onbeat.contracts.records import Event
from onbeat.streams.keys import ROLLOUT_GROUP, JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.logs import to_event
from onbeat.streams.ledger.scripts import as_text, group_states

HANDED_BACK_S = 86_400  # the idle time of a lease that was handed back
MAX_LEASES = 10_000
EVENTS_AT_ONCE = 500
GROUPS_AT_ONCE = 64
ITERATIONS_AT_ONCE = 100


@dataclass(frozen=True)
class PromptLease:
    """A prompt that a rollout has claimed, or had claimed."""

    worker: str
    idle_s: float  # since it was claimed or renewed
    attempt: int

    @property
    def is_handed_back(self) -> bool:
        return self.idle_s >= HANDED_BACK_S


@dataclass(frozen=True)
class StreamLengths:
    num_prompts: int  # dispatched, and not accepted yet
    num_unclaimed: int  # part of num_prompts
    num_groups: int  # accepted and still kept


@dataclass(frozen=True)
class IterationHashes:
    fields: dict[str, str]  # empty if it was never opened
    busy_s: dict[str, float]  # seconds by worker id


async def read_leases(ledger: Ledger, job_id: str) -> dict[str, PromptLease]:
    """Return entry id of the prompts stream -> its lease, for the oldest MAX_LEASES."""
    pending = await ledger.redis.xpending_range(JobKeys(job_id).prompts, ROLLOUT_GROUP, "-", "+", MAX_LEASES)
    return {
        entry["message_id"].decode(): PromptLease(
            entry["consumer"].decode(), entry["time_since_delivered"] / 1000, entry["times_delivered"]
        )
        for entry in pending
    }


async def waiting_entries(ledger: Ledger, job_id: str, number: int, *, is_evaluation: bool = False) -> list[str]:
    """Return the entries of the prompts stream whose groups of an iteration or evaluation are not accepted yet."""
    job = JobKeys(job_id)
    states = await ledger.redis.hgetall(job.evaluation_groups(number) if is_evaluation else job.groups(number))
    return [state.removeprefix("waiting:") for state in as_text(states).values() if state.startswith("waiting:")]


async def accepted_entry(ledger: Ledger, job_id: str, iteration: int, group_id: str) -> str | None:
    """Return the entry of the rollouts stream that holds a group; None while it is not accepted."""
    (state,) = await group_states(ledger.redis, [(JobKeys(job_id).groups(iteration), group_id)])
    text = (state or b"").decode()
    return text.removeprefix("accepted:") if text.startswith("accepted:") else None


async def stored_group(ledger: Ledger, job_id: str, entry: str) -> bytes | None:
    """Return the RolloutGroup at an entry of the rollouts stream; None when it is no longer kept."""
    entries = await ledger.redis.xrange(JobKeys(job_id).rollouts, entry, entry)
    return entries[0][1][b"group"] if entries else None


async def group_advantages(ledger: Ledger, job_id: str, iteration: int, group_id: str) -> list[float | None]:
    """Return the advantage of each response of one group, like `Iterations.advantages`; empty if none were recorded."""
    stored = await ledger.redis.hget(JobKeys(job_id).advantages(iteration), group_id)
    return list(from_json(stored)) if stored else []


async def stored_groups(ledger: Ledger, job_id: str, after: str = "-") -> AsyncIterator[tuple[str, bytes]]:
    """Yield the raw entries of the rollouts stream after an id: (id, RolloutGroup)."""
    while page := await ledger.audit_log.rollouts(job_id, after, GROUPS_AT_ONCE):
        for entry, payload in page:
            yield entry, payload
        after = page[-1][0]


async def newest_events(ledger: Ledger, job_id: str, count: int = 1000) -> list[Event]:
    """Return the newest events, newest first."""
    entries = await ledger.redis.xrevrange(JobKeys(job_id).events, count=count)
    return [to_event(entry, fields) for entry, fields in entries]


async def look(ledger: Ledger, job_id: str, after: str) -> tuple[dict[str, str], list[Event]]:
    """Return the job hash as text and the next events after the cursor, read in one transaction. Raise JobNotFound."""
    job = JobKeys(job_id)
    pipeline = ledger.redis.pipeline(transaction=True)
    pipeline.hgetall(job.job)
    pipeline.xread({job.events: after}, count=EVENTS_AT_ONCE)
    fields, last_entries = await pipeline.execute()
    if b"state" not in fields:
        raise JobNotFound(job_id)
    return as_text(fields), [to_event(entry, event) for entry, event in last_entries[0][1]] if last_entries else []


async def existing_jobs(ledger: Ledger, job_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return the job hashes as text, without jobs that are listed but do not exist (yet)."""
    all_fields = {}
    for job_id, text in zip(job_ids, await ledger.jobs.read(job_ids), strict=True):
        if text is not None:
            words = from_json(text.decode(errors="replace"))
            all_fields[job_id] = dict(zip(words[::2], words[1::2], strict=True))
    return {job_id: fields for job_id, fields in all_fields.items() if "state" in fields}


async def iteration_hashes(ledger: Ledger, job_id: str, numbers: Sequence[int]) -> list[IterationHashes]:
    """Return the hashes of these iterations in a few round trips; empty fields where one was never opened."""
    job = JobKeys(job_id)
    hashes: list[IterationHashes] = []
    for first in range(0, len(numbers), ITERATIONS_AT_ONCE):
        pipeline = ledger.redis.pipeline(transaction=False)
        for number in numbers[first : first + ITERATIONS_AT_ONCE]:
            pipeline.hgetall(job.iteration(number))
            pipeline.hgetall(job.busy(number))
        answers = await pipeline.execute()
        for fields, busy in zip(answers[::2], answers[1::2], strict=True):
            busy_s = {worker: float(seconds) for worker, seconds in as_text(busy).items()}
            hashes.append(IterationHashes(as_text(fields), busy_s))
    return hashes


async def stream_lengths(ledger: Ledger, job_id: str) -> StreamLengths:
    job = JobKeys(job_id)
    num_prompts, num_groups = await ledger.redis.xlen(job.prompts), await ledger.redis.xlen(job.rollouts)
    num_unclaimed = await ledger.rollout.num_unclaimed_prompts(job_id)
    return StreamLengths(num_prompts, max(0, num_unclaimed), num_groups)
