"""The iterations of the ledger, and the groups that were accepted for them."""

import json
from collections.abc import Container, Sequence

from onbeat.contracts.errors import GroupsTrimmed
from onbeat.contracts.states import IterationState
from onbeat.streams.codec import PromptTask, RolloutGroup, decode_group, payload_digest, pin_task
from onbeat.streams.keys import ROLLOUT_GROUP, JobKeys
from onbeat.streams.ledger.scripts import GROUPS_AT_ONCE, LedgerPart
from onbeat.streams.outcomes import Outcome
from onbeat.streams.stream_ids import order

TRACED_S = 86_400  # a record of traces that no broker reads or writes expires, also that of a job just deleted


class Iterations(LedgerPart):
    """The iterations of all jobs."""

    async def open(
        self,
        job_id: str,
        iteration: int,
        version: int,
        tasks: list[PromptTask],
        spares: Sequence[PromptTask] = (),
        choice: str = "",
    ) -> str:
        """Dispatch an iteration's groups, all pinned to `version`, which must be the published one.

        With `spares`, each accepted group whose rewards do not differ is replaced by the next spare one of its source.

        `choice`: how the prompts were chosen, where outcomes decide, for the iteration's record and the audit log.

        Return '' or the reason why it was not opened: `max_staleness` bounds how far `version` may be behind.
        """
        job = JobKeys(job_id)
        named = [(task.group_id, task) for task in tasks] + [(task.source or task.group_id, task) for task in spares]
        pairs = [item for name, task in named for item in (name, pin_task(task, version).SerializeToString())]
        more_keys = [job.iteration(iteration), job.groups(iteration), job.prompts, job.spares(iteration)]
        digest = payload_digest(choice.encode()) if choice else ""
        args = (iteration, version, ROLLOUT_GROUP, len(tasks), choice, digest, *pairs)
        reason: bytes = await self._run("open_iteration", job, more_keys, *args)
        return reason.decode()

    async def open_rows(self, job_id: str, iteration: int, rows: Sequence[str], held_out: Sequence[str] = ()) -> str:
        """Open a supervised iteration with these rows (JSON). Return '' or the reason why it was not opened.

        `held_out`: rows that the job keeps to measure its loss on; given with its first iteration.
        """
        job = JobKeys(job_id)
        pairs = [item for index, row in enumerate(rows) for item in (f"{iteration}-{index}", row)]
        digest = payload_digest("\n".join(rows).encode())
        more_keys = [job.iteration(iteration), job.groups(iteration), job.rows(iteration), job.held_out_rows]
        kept = json.dumps(list(held_out)) if held_out else ""
        reason: bytes = await self._run("open_rows", job, more_keys, iteration, digest, kept, *pairs)
        return reason.decode()

    async def rows(self, job_id: str, iteration: int) -> dict[str, str]:
        """Return group id -> conversation (JSON) of an open supervised iteration; empty before it is open, and once its
        tokens are recorded."""
        return await self._texts(JobKeys(job_id).rows(iteration))

    async def held_out_rows(self, job_id: str) -> list[str]:
        """Return the rows (JSON) on which the job measures its loss."""
        rows: list[str] = json.loads((await self.redis.hget(JobKeys(job_id).held_out_rows, "rows")) or "[]")
        return rows

    async def fields(self, job_id: str, iteration: int) -> dict[str, str]:
        """Return the iteration hash as text; empty when it was never opened."""
        return await self._texts(JobKeys(job_id).iteration(iteration))

    async def state(self, job_id: str, iteration: int) -> IterationState | None:
        state = await self.redis.hget(JobKeys(job_id).iteration(iteration), "state")
        return IterationState(state.decode()) if state else None

    async def policy_version(self, job_id: str, iteration: int) -> int | None:
        """Return the policy version that generates the iteration; None when it was never opened."""
        version = await self.redis.hget(JobKeys(job_id).iteration(iteration), "policy_version")
        return int(version) if version else None

    async def groups(self, job_id: str, iteration: int) -> dict[str, str]:
        """Return group id -> `waiting:ENTRY` | `accepted:ENTRY`."""
        return await self._texts(JobKeys(job_id).groups(iteration))

    async def accepted_entries(self, job_id: str, iteration: int, known: Container[str] = ()) -> list[str]:
        """Return the entries of the accepted groups but the `known` ones (ids), in the order of the stream."""
        states = (await self.groups(job_id, iteration)).items()
        accepted = [state for group_id, state in states if state.startswith("accepted:") and group_id not in known]
        return sorted((state.removeprefix("accepted:") for state in accepted), key=order)

    async def accepted_groups(self, job_id: str, iteration: int, known: Container[str] = ()) -> list[RolloutGroup]:
        """Return the accepted groups of an iteration but the `known` ones (ids), in the order of the stream.

        Raise GroupsTrimmed when they are no longer kept.
        """
        job = JobKeys(job_id)
        entries = await self.accepted_entries(job_id, iteration, known)
        if not entries:
            return []
        groups: list[RolloutGroup] = []
        for first in range(0, len(entries), GROUPS_AT_ONCE):
            wanted = entries[first : first + GROUPS_AT_ONCE]
            stored = await self.redis.xrange(job.rollouts, wanted[0], wanted[-1])
            groups += [decode_group(fields[b"group"]) for entry, fields in stored if entry.decode() in wanted]
        if len(groups) < len(entries):
            first_kept = int(await self.redis.hget(job.job, "num_trimmed") or 0)
            if iteration < first_kept:
                raise GroupsTrimmed(job_id, iteration, first_kept)
        return groups

    async def micro_batches(self, job_id: str, iteration: int) -> list[tuple[int, list[str]]]:
        """Return (trainer replica, group ids) of each micro-batch of an iteration, in the order of recording."""
        recorded = await self.redis.hgetall(JobKeys(job_id).micro_batches(iteration))
        batches = []
        for place, content in recorded.items():
            number, _, ids = content.decode().partition("|")
            batches.append((int(number), int(place.split(b":")[0]), ids.split(",")))
        return [(rank, ids) for _, rank, ids in sorted(batches)]

    async def taken_groups(self, job_id: str, iteration: int) -> set[str]:
        """Return the groups of an iteration that a trainer replica has taken."""
        return {group_id.decode() for group_id in await self.redis.smembers(JobKeys(job_id).taken(iteration))}

    async def advantages(self, job_id: str, iteration: int) -> dict[str, list[float | None]]:
        """Return group id -> each response's advantage as trained; empty before the commit, or if none are recorded."""
        stored = await self.redis.hgetall(JobKeys(job_id).advantages(iteration))
        return {group_id.decode(): json.loads(advantages) for group_id, advantages in stored.items()}

    async def lengths(self, job_id: str, rows: Sequence[int]) -> list[int | None]:
        """Return the mean tokens per response for each row of the data, when it was last generated; None if unknown."""
        lengths = await self.redis.hmget(JobKeys(job_id).lengths, rows) if rows else []
        return [None if length is None else int(length) for length in lengths]

    async def choices(self, job_id: str, wanted: range) -> list[tuple[str, list[Outcome]]]:
        """Return how the prompts of iterations were chosen, as recorded, and the outcomes of their groups so far."""
        pipeline, job = self.redis.pipeline(transaction=False), JobKeys(job_id)
        for iteration in wanted:
            pipeline.hget(job.iteration(iteration), "choice")
            pipeline.hvals(job.outcomes(iteration))
        answers = await pipeline.execute()
        return [
            ((choice or b"").decode(), [Outcome.read(words.decode()) for words in outcomes])
            for choice, outcomes in zip(answers[::2], answers[1::2], strict=True)
        ]

    async def outcomes_before(self, job_id: str) -> str:
        """Return what a fork knows of its parent's rows, as JSON; '' if it knows nothing."""
        return ((await self.redis.hget(JobKeys(job_id).outcomes_before, "rows")) or b"").decode()

    async def trim(self, job_id: str, iteration: int, num_kept: int) -> bool:
        """Drop the groups of the oldest iteration that still has them, if `num_kept` newer ones are durable.

        Return False when another iteration is to be dropped first, or nothing yet.
        """
        job = JobKeys(job_id)
        for_replay = [job.micro_batches(iteration), job.taken(iteration)]
        more_keys = [job.rollouts, job.groups(iteration), *for_replay, job.advantages(iteration)]
        return bool(await self._run("trim_iteration", job, more_keys, iteration, num_kept))

    async def next_untraced(self, job_id: str) -> int:
        """Return the first iteration whose OpenTelemetry trace is left to export; 0 if none has been exported."""
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.hget(JobKeys(job_id).traces, "next_iteration")
        pipeline.expire(JobKeys(job_id).traces, TRACED_S)
        return int((await pipeline.execute())[0] or 0)

    async def record_traced(self, job_id: str, next_iteration: int) -> None:
        """Record that the traces of all iterations before `next_iteration` are exported, or left out."""
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.hset(JobKeys(job_id).traces, "next_iteration", next_iteration)
        pipeline.expire(JobKeys(job_id).traces, TRACED_S)
        await pipeline.execute()
