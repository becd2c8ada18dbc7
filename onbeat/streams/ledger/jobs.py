"""The jobs of the ledger: created, moved along JOB_MOVES, listed, deleted."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onbeat.contracts.errors import (
    CannotResume,
    IllegalTransition,
    JobDeleted,
    JobNotFinal,
    JobNotFound,
    LeaseLost,
    NotRunningYet,
    TooManyPending,
)
from onbeat.contracts.states import JOB_MOVES, JobState
from onbeat.streams import keys
from onbeat.streams.codec import payload_digest
from onbeat.streams.keys import ROLLOUT_GROUP, TRAINER_GROUP, JobKeys
from onbeat.streams.ledger.job_lists import FINAL, JobLists
from onbeat.streams.ledger.scripts import LedgerPart, load_script

UNLINKED_AT_ONCE = 100  # iterations
DELETED_ID_S = 86_400


@dataclass(frozen=True)
class Extension:
    """An extension of a job that has done all of its iterations."""

    config: dict[str, Any]
    num_iterations: int
    next_evaluation: int | None  # None: the job has no evaluations


class Jobs(LedgerPart):
    """The records of all jobs."""

    def __init__(self, redis: Any, lists: JobLists) -> None:
        super().__init__(redis)
        self._lists = lists

    async def create(
        self,
        job_id: str,
        config: dict[str, Any],
        num_iterations: int,
        max_staleness: int,
        submitter: str = "",
        max_pending: int | None = None,
        outcomes: str = "",
    ) -> bool:
        """Store a PENDING job; return False if the id exists. It is listed before it is created: a crash hides no job.

        max_staleness: how many versions older than its number an iteration's policy may be; 0 in the strict modes.
        submitter: id of the API key of the request. max_pending: how many pending jobs it may have, this one included.

        outcomes: what a fork knows of its parent's rows, as JSON.

        Raise TooManyPending; the id stays listed until a broker drops it. Raise JobDeleted for the id of a job that was
        deleted within a day: a late repetition does not bring it back.
        """
        job = JobKeys(job_id)
        time_s = await self.now()  # whole seconds would sort the jobs of one second by name
        await self.redis.zadd(keys.ALL_JOBS, {job_id: time_s}, nx=True)
        text = json.dumps(config)
        digest = payload_digest(text.encode())
        fields = ["name", config["name"], "pool", config["pool"], "config", text, "submitter", submitter]
        fields += ["num_iterations", str(num_iterations), "max_staleness", str(max_staleness)]
        if (fork := config.get("fork")) is not None:  # iterations before its first one belong to another job
            numbers = ("first_iteration", "num_opened", "next_iteration", "next_evaluation", "num_trimmed")
            fields += [word for name in numbers for word in (name, str(fork["iteration"]))]
        more_keys = [job.prompts, job.rollouts, job.deleted, keys.waiting_of(submitter), job.outcomes_before]
        args = (job_id, digest, ROLLOUT_GROUP, TRAINER_GROUP, as_argument(max_pending), outcomes, *fields)
        outcome = (await self._run("create_job", job, more_keys, *args)).decode()
        if outcome == "full":
            assert max_pending is not None
            raise TooManyPending(max_pending, max_pending)
        if outcome == "deleted":
            if not await self.redis.hexists(job.deleted, "state"):  # else a broker died, and another has to finish
                await self._lists.remove(job_id)
            raise JobDeleted(job_id)
        await self.file(job_id)
        return bool(outcome == "created")

    async def file(self, job_id: str) -> None:
        """Put a job into the list that matches its state, or off the lists of open jobs if it does not exist."""
        names = ("state", "pool", "submitter", "created_at", "finished_at")
        values = await self.redis.hmget(JobKeys(job_id).job, *names)
        fields = {name: value.decode(errors="replace") for name, value in zip(names, values, strict=True) if value}
        if "state" in fields:
            await self._lists.file({job_id: fields})
        else:
            await self.redis.zrem(keys.ACTIVE_JOBS, job_id)
            await self.redis.zrem(keys.WAITING_JOBS, job_id)

    async def record_sharing(self, job_id: str, sharing: str) -> None:
        """Record what engine and trainer of a job share: "cores", "accelerators" or "nothing"."""
        await self._run("record_sharing", JobKeys(job_id), [], sharing)

    async def fields(self, job_id: str) -> dict[str, str]:
        """Return the job hash as text. Raise JobNotFound."""
        fields = await self._texts(JobKeys(job_id).job)
        if "state" not in fields:
            raise JobNotFound(job_id)
        return fields

    async def read(self, job_ids: Sequence[str]) -> list[bytes | None]:
        """Return the hashes of many jobs, each as JSON (see read_job.lua), in few round trips."""
        if not job_ids:
            return []
        script = self.redis.register_script(load_script("read_job"))
        pipeline = self.redis.pipeline(transaction=False)
        for job_id in job_ids:
            await script(keys=[JobKeys(job_id).job], client=pipeline)
        return list(await pipeline.execute())

    async def state(self, job_id: str) -> JobState:
        """Return the job's state. Raise JobNotFound."""
        state = await self.redis.hget(JobKeys(job_id).job, "state")
        if state is None:
            raise JobNotFound(job_id)
        return JobState(state.decode())

    async def ids(self) -> list[str]:
        """Return all job ids, the oldest first. This takes long where there are many: see `lists` for parts."""
        return [job_id.decode() for job_id in await self.redis.zrange(keys.ALL_JOBS, 0, -1)]

    async def listed_at(self, job_id: str) -> float | None:
        """Return the Unix time since when the job is listed, just before it was created; None when it is not listed."""
        time_s = await self.redis.zscore(keys.ALL_JOBS, job_id)
        return None if time_s is None else float(time_s)

    async def move(
        self, job_id: str, wanted: JobState, error: str = "", epoch: str = "", seen: JobState | None = None
    ) -> JobState:
        """Move along an edge of JOB_MOVES; return the state before. Raise IllegalTransition or JobNotFound.

        `epoch`: move only as the job's trainer. Raise LeaseLost when another one owns it. `seen`: move only from there.
        """
        allowed = [state for state, moves in JOB_MOVES.items() if wanted in moves and seen in (None, state)]
        is_final = "1" if wanted.is_final else "0"
        moved, before = await self._run("move_job", JobKeys(job_id), [], wanted, error, is_final, epoch, *allowed)
        if before == b"fenced":
            raise LeaseLost(job_id)
        if not before:
            raise JobNotFound(job_id)
        if not moved:
            if (before, wanted) == (b"PENDING", JobState.PAUSED):
                raise NotRunningYet(job_id, before.decode())
            raise IllegalTransition(job_id, before.decode(), wanted)
        if wanted.is_final or before == b"PENDING":
            await self.file(job_id)
        return JobState(before.decode())

    async def resume(
        self, job_id: str, seen: JobState, extension: Extension | None = None, max_pending: int | None = None
    ) -> None:
        """Make a job that was seen to be over PENDING again. Raises CannotResume, TooManyPending or JobNotFound.

        max_pending: how many pending jobs the key may have that submitted it, this one included.
        """
        assert seen.is_final, f"{job_id} is {seen}, it is not over"
        more: list[Any] = []
        if extension is not None:
            text, due = json.dumps(extension.config), extension.next_evaluation
            more = [text, payload_digest(text.encode()), extension.num_iterations, as_argument(due)]
        job, args = JobKeys(job_id), (job_id, as_argument(max_pending), seen, *more)
        submitter = (await self.redis.hget(job.job, "submitter") or b"").decode(errors="replace")
        outcome = (await self._run("resume_job", job, [keys.waiting_of(submitter)], *args)).decode()
        if outcome == "full":
            assert max_pending is not None
            raise TooManyPending(max_pending, max_pending)
        if not outcome:
            raise JobNotFound(job_id)
        if outcome != "resumed":
            raise CannotResume(job_id, outcome, f"it was {seen} a moment ago; look again")
        await self.file(job_id)

    async def delete(self, job_id: str) -> None:
        """Remove a final job and all of its keys. Raise JobNotFound or JobNotFinal.

        The job does not exist from the first step on. Repeating the call finishes a deletion that died half-way. The
        steps up to the mark also work while the memory of Redis is full.
        """
        job = JobKeys(job_id)
        stored = await self.redis.hmget(job.job, "pool", "submitter")
        if stored == [None, None]:  # a deletion that died half-way
            stored = await self.redis.hmget(job.deleted, "pool", "submitter")
        queues = [(value or b"").decode(errors="replace") for value in stored]
        outcome = (await self._run("delete_job", job, [job.deleted], *FINAL)).decode()
        if not outcome:
            raise JobNotFound(job_id)
        if outcome != "deleting":
            raise JobNotFinal(job_id, outcome)
        num_opened = await self.redis.hget(job.deleted, "num_opened")  # None: the steps below were done before
        await self.redis.unlink(*job.of_job)
        numbers = range(int(num_opened) + 1) if num_opened else range(0)
        for first in range(0, len(numbers), UNLINKED_AT_ONCE):
            batch = numbers[first : first + UNLINKED_AT_ONCE]
            await self.redis.unlink(*(key for number in batch for key in job.numbered(number)))
        pipeline = self.redis.pipeline(transaction=True)  # the record becomes a mark, which refuses the id for a while
        pipeline.delete(job.deleted)
        pipeline.hset(job.deleted, "deleted_at", await self.now())
        pipeline.expire(job.deleted, DELETED_ID_S)
        await pipeline.execute()
        await self._lists.remove(job_id, *queues)

    async def is_deleted(self, job_id: str) -> bool:
        """Return whether the job is being deleted, or was deleted within a day."""
        return bool(await self.redis.exists(JobKeys(job_id).deleted))

    async def forget(self, job_id: str) -> None:
        """Take an id without a job off all lists: its creator died before creating it."""
        if not await self.redis.exists(JobKeys(job_id).job):
            await self._lists.remove(job_id)


def as_argument(number: int | None) -> str:
    """Return an argument of a script; '' for no number."""
    return "" if number is None else str(number)
