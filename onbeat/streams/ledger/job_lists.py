"""Lists of jobs by the work that is left on them: pending ones by pool, started ones, ended ones.

A job's record alone decides its state; the lists follow, in a second step. A process that dies between the two leaves a
job in the wrong list, until a broker files it again (services/broker/retention.py looks at every job in turn). Filing
can be repeated. A stale read does no harm where jobs move on, and the next look corrects the list where a user resumes
a job.

    pending --> started --> ended --> pending, when it is resumed
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from onbeat.contracts.states import JobState
from onbeat.streams import keys

FINAL = [state for state in JobState if state.is_final]


class JobLists:
    """The lists of one Redis. No call costs more than the jobs that it returns."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis

    async def file(self, jobs: Mapping[str, Mapping[str, str]]) -> None:
        """Put jobs into the lists that match their states, in one round trip.

        `jobs`: the fields of each, at least its state; pool, submitter and times where it has them.
        """
        entries: dict[str, dict[str, float]] = defaultdict(dict)  # list -> id -> its sort key
        gone: dict[str, list[str]] = defaultdict(list)
        for job_id, fields in jobs.items():
            state, created_at = fields["state"], seconds_in(fields, "created_at")
            queues = [keys.WAITING_JOBS, keys.waiting_in(fields.get("pool", ""))]
            queues.append(keys.waiting_of(fields.get("submitter", "")))
            for queue in queues:
                if state == JobState.PENDING:
                    entries[queue][job_id] = created_at
                else:
                    gone[queue].append(job_id)
            if state in FINAL:
                entries[keys.ended_jobs(state)][job_id] = seconds_in(fields, "finished_at")
                gone[keys.ACTIVE_JOBS].append(job_id)
            elif state != JobState.PENDING:
                entries[keys.ACTIVE_JOBS][job_id] = created_at
            for other in FINAL:
                if other != state:
                    gone[keys.ended_jobs(other)].append(job_id)
        pipeline = self._redis.pipeline(transaction=False)
        for name, times in entries.items():
            pipeline.zadd(name, times, nx=True)
        for name, job_ids in gone.items():
            pipeline.zrem(name, *job_ids)
        await pipeline.execute()

    async def remove(self, job_id: str, pool: str = "", submitter: str = "") -> None:
        """Take an id that has no job off all lists. `pool`, `submitter`: those in whose queues it may be."""
        pipeline = self._redis.pipeline(transaction=False)
        queues = (keys.WAITING_JOBS, keys.waiting_in(pool), keys.waiting_of(submitter))
        for name in (keys.ALL_JOBS, keys.ACTIVE_JOBS, *queues):
            pipeline.zrem(name, job_id)
        for state in FINAL:
            pipeline.zrem(keys.ended_jobs(state), job_id)
        await pipeline.execute()

    async def started(self) -> list[str]:
        """Return the jobs that were started and have not ended, the oldest first."""
        return as_ids(await self._redis.zrange(keys.ACTIVE_JOBS, 0, -1))

    async def started_and_next(self, num_waiting: int) -> list[str]:
        """Return the started jobs and the first `num_waiting` of the pending ones, in one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.zrange(keys.ACTIVE_JOBS, 0, -1)
        pipeline.zrange(keys.WAITING_JOBS, 0, num_waiting - 1)
        started, waiting = await pipeline.execute()
        return as_ids(dict.fromkeys(started + waiting))

    async def waiting(self, pool: str, first: int, count: int) -> list[str]:
        """Return a part of a pool's queue, in the order in which trainers take it."""
        return as_ids(await self._redis.zrange(keys.waiting_in(pool), first, first + count - 1))

    async def num_waiting(self, pool: str | None = None) -> int:
        """Return the number of pending jobs, of one pool or of all."""
        return int(await self._redis.zcard(keys.WAITING_JOBS if pool is None else keys.waiting_in(pool)))

    async def num_waiting_of(self, submitter: str) -> int:
        """Return the number of pending jobs that were submitted with one API key."""
        return int(await self._redis.zcard(keys.waiting_of(submitter)))

    async def places(self, pool: str, job_ids: Sequence[str]) -> list[int | None]:
        """Return how many jobs are before each one in the pool's queue; None for one that is not in it."""
        pipeline = self._redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.zrank(keys.waiting_in(pool), job_id)
        return list(await pipeline.execute())

    async def newest(self, state: JobState | None, first: int, count: int) -> list[str]:
        """Return a part of the jobs that may be in a state, the newest (in a final state: the last ended) first."""
        name = keys.ALL_JOBS if state is None else keys.ACTIVE_JOBS
        if state is JobState.PENDING:
            name = keys.WAITING_JOBS
        elif state is not None and state.is_final:
            name = keys.ended_jobs(state)
        return as_ids(await self._redis.zrevrange(name, first, first + count - 1))

    async def ended_since(self, time_s: float) -> list[str]:
        """Return the jobs that ended at this Unix time or later."""
        pipeline = self._redis.pipeline(transaction=False)
        for state in FINAL:
            pipeline.zrangebyscore(keys.ended_jobs(state), time_s, "+inf")
        return [job_id for ids in await pipeline.execute() for job_id in as_ids(ids)]

    async def counts(self) -> dict[JobState, int]:
        """Return the number of jobs that are pending, and of those in each final state."""
        names = {JobState.PENDING: keys.WAITING_JOBS} | {state: keys.ended_jobs(state) for state in FINAL}
        pipeline = self._redis.pipeline(transaction=False)
        for name in names.values():
            pipeline.zcard(name)
        return dict(zip(names, map(int, await pipeline.execute()), strict=True))


def as_ids(raw_ids: Any) -> list[str]:
    return [job_id.decode(errors="replace") for job_id in raw_ids]


def seconds_in(fields: Mapping[str, str], name: str) -> float:
    """Return a time field in seconds; 0 when it is missing or not a number."""
    try:
        return float(fields.get(name, "0"))
    except ValueError:
        return 0.0
