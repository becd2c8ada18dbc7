"""The calls of a trainer: own a job, take groups, commit iterations. An epoch fences off an earlier owner."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import ResponseError

from onbeat.contracts.errors import JobFailed, LeaseLost, StreamLost
from onbeat.contracts.states import JobState
from onbeat.streams.codec import RolloutGroup, check_group, decode_group, encode_group, payload_digest
from onbeat.streams.keys import TRAINER_GROUP, JobKeys
from onbeat.streams.ledger.jobs import Jobs
from onbeat.streams.ledger.scripts import LedgerPart
from onbeat.streams.ledger.versions import diverged


class TrainerSide(LedgerPart):
    """The ledger as trainers use it."""

    def __init__(self, redis: Any, jobs: Jobs) -> None:
        super().__init__(redis)
        self._jobs = jobs

    async def claim_job(self, job_id: str, owner: str, lease_s: float, run: str = "") -> str | None:
        """Become the job's trainer; return the epoch that fences off earlier owners, or None if it is not free.

        `run`: an id of this run of the owner, by which its supervisor ends the lease once the run is over.
        """
        epoch = await self._run("claim_job", JobKeys(job_id), [], owner, lease_s, run)
        if epoch:
            await self._jobs.file(job_id)
        return epoch.decode() if epoch else None

    async def renew_job(self, job_id: str, epoch: str, lease_s: float, doing: str = "") -> JobState:
        """Renew the lease and return the job's state. Raise LeaseLost. `doing`: what its trainer does, for people."""
        state = await self._run_as_owner("renew_job", JobKeys(job_id), [], epoch, lease_s, doing)
        return JobState(state.decode())

    async def give_back(self, job_id: str, epoch: str, is_handover: bool = False) -> None:
        """End the lease now. Raise LeaseLost. `is_handover`: the trainer goes in good order, and is not counted as
        lost."""
        await self._run_as_owner("renew_job", JobKeys(job_id), [], epoch, 0, "", "1" if is_handover else "0")

    async def release_job(self, job_id: str, run: str) -> bool:
        """End the lease of a run that is surely over. Return False when another run holds the job."""
        return bool(await self._run("release_job", JobKeys(job_id), [], run))

    async def record_dtype(self, job_id: str, epoch: str, dtype: str, reason: str) -> str:
        """Record the dtype that the job computes in, once; return the recorded one. Raise LeaseLost."""
        return str((await self._run_as_owner("record_dtype", JobKeys(job_id), [], epoch, dtype, reason)).decode())

    async def record_row_tokens(self, job_id: str, epoch: str, num_tokens: int, reason: str) -> int:
        """Record the tokens of a packed row that the trainer has chosen, once; return the recorded number. Raise
        LeaseLost."""
        return int(await self._run_as_owner("record_row_tokens", JobKeys(job_id), [], epoch, num_tokens, reason))

    async def record_teacher(self, job_id: str, epoch: str, digest: str) -> str:
        """Record the digest of the job's teacher, once; return the recorded one. Raise LeaseLost."""
        return str((await self._run_as_owner("record_teacher", JobKeys(job_id), [], epoch, digest)).decode())

    async def record_rows(
        self, job_id: str, epoch: str, iteration: int, trainer: str, groups: Sequence[RolloutGroup]
    ) -> None:
        """Record the tokens of all rows of a supervised iteration, unless they are recorded. Raise LeaseLost, and
        ValueError when a group breaks its promises."""
        words: list[Any] = []
        for group in groups:
            check_group(group)
            payload = encode_group(group)
            failure = group.failure.kind if group.HasField("failure") else ""
            words += [group.group_id, payload, payload_digest(payload), failure]
        job = JobKeys(job_id)
        more_keys = [job.iteration(iteration), job.groups(iteration), job.rows(iteration), job.rollouts]
        await self._run_as_owner("record_rows", job, more_keys, epoch, iteration, trainer, *words)

    async def take(self, job_id: str, consumer: str, count: int, timeout_s: float) -> list[RolloutGroup]:
        """Return the next accepted groups in completion order; empty when none came in time."""
        job = JobKeys(job_id)
        block_ms = max(1, int(timeout_s * 1000))
        stream = {job.rollouts: ">"}
        try:
            answer = await self.redis.xreadgroup(TRAINER_GROUP, consumer, stream, count=count, block=block_ms)
        except ResponseError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):  # UNBLOCKED: the stream is deleted while we wait
                raise
            if await self.redis.exists(job.job):
                raise StreamLost(job_id, "rollouts") from error
            raise LeaseLost(job_id, "was deleted") from error
        payloads = {entry: fields.get(b"group", b"") for entry, fields in (answer[0][1] if answer else [])}
        return list((await self._own_entries(job, job.rollouts, decode_group, payloads)).values())

    async def record_micro_batch(
        self, job_id: str, epoch: str, iteration: int, rank: int, index: int, group_ids: list[str]
    ) -> list[str]:
        """Take groups for trainer replica `rank`: those that no replica has taken become its micro-batch `index`.

        Return the granted groups, in the given order; a repeated (rank, index) returns the same ones again. If none is
        granted, nothing is written, and the index is still free. Raise LeaseLost.
        """
        job = JobKeys(job_id)
        more_keys = [job.micro_batches(iteration), job.taken(iteration)]
        place = f"{rank}:{index}"
        granted = await self._run_as_owner("record_micro_batch", job, more_keys, epoch, place, *group_ids)
        return granted.decode().split(",") if granted else []

    async def commit(
        self,
        job_id: str,
        epoch: str,
        iteration: int,
        version: int,
        digest: str,
        metrics: dict[str, float],
        used: str,
        is_published: bool = True,
        advantages: Mapping[str, Sequence[float | None]] | None = None,
    ) -> bool:
        """Close a drained iteration and publish `version`. Return False if it was committed before. Raise LeaseLost,
        and JobFailed when replayed weights differ, or Redis has lost groups.

        `used`: the `used_digest` of the groups that the step was made of.

        Not `is_published`: rollouts stay on the version that they have; allowed while the next iteration can be opened
        on that one.

        `advantages`: group id -> the advantage of each response, for people; kept as long as the groups are.
        """
        job = JobKeys(job_id)
        args = (epoch, iteration, version, digest, json.dumps(metrics), "1" if is_published else "0", used)
        published = [word for group_id, values in (advantages or {}).items() for word in (group_id, json.dumps(values))]
        more_keys = [job.iteration(iteration), job.advantages(iteration)]
        outcome = (await self._run_as_owner("commit_iteration", job, more_keys, *args, *published)).decode()
        if outcome == "diverged":
            raise diverged(f"replaying iteration {iteration}")
        if outcome == "open":
            raise JobFailed(
                f"iteration {iteration} is open in Redis, and its groups were trained: Redis has lost what it had "
                "acknowledged. Restore its newest data, or submit the job again"
            )
        assert outcome != "unbounded", f"version {version} must be published: the next iteration needs it"
        assert outcome in ("committed", "already"), f"iteration {iteration} is {outcome}"
        return bool(outcome == "committed")

    async def checkpointed(self, job_id: str, epoch: str, first: int, next_iteration: int, path: str) -> None:
        """Record iterations `first` to `next_iteration - 1` as durable: acknowledge their groups. Raise LeaseLost."""
        job = JobKeys(job_id)
        num_trimmed = int(await self.redis.hget(job.job, "num_trimmed") or 0)  # the groups of these iterations are gone
        ledgers = [job.groups(iteration) for iteration in range(max(first, num_trimmed), next_iteration)]
        args = (epoch, next_iteration, path, TRAINER_GROUP)
        await self._run_as_owner("checkpointed", job, [job.rollouts, *ledgers], *args)
