"""The ledger: one typed method per script, and the plain reads. All state that outlives a process is behind this class.

Scripts are atomic in Redis, so two brokers, a zombie trainer or a broker that died half-way cannot break a rule.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from statistics import fmean
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from onbeat.errors import (
    CannotResume,
    GroupsTrimmed,
    IllegalTransition,
    JobDeleted,
    JobFailed,
    JobNotFinal,
    JobNotFound,
    LeaseLost,
    StreamLost,
)
from onbeat.streams import audit, keys
from onbeat.streams.batching import BatchedScript
from onbeat.streams.codec import (
    PromptTask,
    RolloutGroup,
    check_group,
    check_token_lengths,
    decode_group,
    decode_task,
    encode_group,
    payload_digest,
    pin_task,
    span_versions,
)
from onbeat.streams.evaluations import Evaluations
from onbeat.streams.heartbeats import Heartbeats, read_heartbeats
from onbeat.streams.job_lists import JobLists
from onbeat.streams.keys import ROLLOUT_GROUP, TRAINER_GROUP, JobKeys
from onbeat.streams.traces import Traces
from onbeat.types import (
    JOB_MOVES,
    EvaluationState,
    Event,
    IterationState,
    JobState,
    PublishedWeights,
    Verdict,
    WeightsRecord,
    WeightUpdate,
    WorkerRecord,
)

UNLINKED_AT_ONCE = 100  # iterations
DELETED_ID_S = 86_400
UNREADABLE_EVENT = "event.unreadable"


@dataclass(frozen=True)
class Claim:
    """A claimed prompt. It is this worker's until the lease expires unrenewed."""

    entry_id: str
    attempt: int  # 1 for the first claim; claims that were handed back through no fault of the group do not count
    task: PromptTask


@dataclass(frozen=True)
class Extension:
    """More iterations for a job that has done those that it had."""

    config: dict[str, Any]
    num_iterations: int
    next_evaluation: int | None  # None: the job has no evaluations


def load_script(name: str) -> str:
    folder = resources.files("onbeat.streams") / "scripts"
    return (folder / "prelude.lua").read_text() + (folder / f"{name}.lua").read_text()


class Ledger:
    """Async access to all jobs of one Redis."""

    def __init__(self, redis: Redis) -> None:
        self.redis: Any = redis  # redis-py types answers as unions over both protocols
        self._scripts: dict[str, Any] = {}
        self._submit: BatchedScript | None = None
        self.lists = JobLists(self.redis)
        self.evaluations = Evaluations(self.redis, self._run)
        self.traces = Traces(self.redis, self._run)

    async def _run(self, name: str, job: JobKeys, more_keys: Sequence[str], *args: Any) -> Any:
        return await self._script(name)(keys=[job.job, job.events, *more_keys, job.audit], args=list(args))

    def _script(self, name: str) -> Any:
        if name not in self._scripts:
            self._scripts[name] = self.redis.register_script(load_script(name))
        return self._scripts[name]

    # ---- jobs ----------------------------------------------------------------------------------------------------

    async def create_job(
        self, job_id: str, config: dict[str, Any], num_iterations: int, max_staleness: int, submitter: str = ""
    ) -> bool:
        """Store a PENDING job; return False if the id exists. It is listed before it is created: a crash hides no job.

        max_staleness: how many versions older than its number an iteration's policy may be; 0 in the strict modes.
        submitter: id of the API key of the request.

        Raise JobDeleted for the id of a job that was deleted within a day: a late repetition does not bring it back.
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
        more_keys = [job.prompts, job.rollouts, job.deleted]
        args = (job_id, digest, ROLLOUT_GROUP, TRAINER_GROUP, *fields)
        outcome = (await self._run("create_job", job, more_keys, *args)).decode()
        if outcome == "deleted":
            await self.lists.remove(job_id)
            raise JobDeleted(job_id)
        await self.file_job(job_id)
        return bool(outcome == "created")

    async def file_job(self, job_id: str) -> None:
        """Put a job into the list that matches its state, or off the lists of open jobs if it does not exist."""
        names = ("state", "pool", "submitter", "created_at", "finished_at")
        values = await self.redis.hmget(JobKeys(job_id).job, *names)
        found = {name: value.decode(errors="replace") for name, value in zip(names, values, strict=True) if value}
        if "state" in found:
            await self.lists.file({job_id: found})
        else:
            await self.redis.zrem(keys.ACTIVE_JOBS, job_id)
            await self.redis.zrem(keys.WAITING_JOBS, job_id)

    async def job_fields(self, job_id: str) -> dict[str, str]:
        """Return the job hash as text. Raise JobNotFound."""
        fields = await self.redis.hgetall(JobKeys(job_id).job)
        if b"state" not in fields:
            raise JobNotFound(job_id)
        return {name.decode(errors="replace"): value.decode(errors="replace") for name, value in fields.items()}

    async def read_jobs(self, job_ids: Sequence[str]) -> list[bytes | None]:
        """Return the hashes of many jobs, each as JSON (see read_job.lua), in few round trips."""
        if not job_ids:
            return []
        script, pipeline = self._script("read_job"), self.redis.pipeline(transaction=False)
        for job_id in job_ids:
            await script(keys=[JobKeys(job_id).job], client=pipeline)
        return list(await pipeline.execute())

    async def job_state(self, job_id: str) -> JobState:
        """Return the job's state. Raise JobNotFound."""
        state = await self.redis.hget(JobKeys(job_id).job, "state")
        if state is None:
            raise JobNotFound(job_id)
        return JobState(state.decode())

    async def job_ids(self) -> list[str]:
        """Return all job ids, the oldest first. This takes long where there are many: see `lists` for parts."""
        return [job_id.decode() for job_id in await self.redis.zrange(keys.ALL_JOBS, 0, -1)]

    async def listed_at(self, job_id: str) -> float | None:
        """Return the Unix time since when the job is listed, just before it was created; None when it is not listed."""
        time_s = await self.redis.zscore(keys.ALL_JOBS, job_id)
        return None if time_s is None else float(time_s)

    async def now(self) -> float:
        """Return Unix seconds by the Redis clock, the source of all times in the ledger."""
        seconds, microseconds = await self.redis.time()
        return float(seconds) + float(microseconds) / 1e6

    async def move_job(self, job_id: str, wanted: JobState, error: str = "", epoch: str = "") -> JobState:
        """Move along an edge of JOB_MOVES; return the state before. Raise IllegalTransition or JobNotFound.

        `epoch`: move only as the job's trainer. Raise LeaseLost when another one owns it.
        """
        allowed = [state for state, moves in JOB_MOVES.items() if wanted in moves]
        is_final = "1" if wanted.is_final else "0"
        moved, before = await self._run("move_job", JobKeys(job_id), [], wanted, error, is_final, epoch, *allowed)
        if before == b"fenced":
            raise LeaseLost(f"job {job_id} has another trainer now")
        if not before:
            raise JobNotFound(job_id)
        if not moved:
            raise IllegalTransition(job_id, before.decode(), wanted)
        if wanted.is_final or before == b"PENDING":
            await self.file_job(job_id)
        return JobState(before.decode())

    async def resume_job(self, job_id: str, seen: JobState, extension: Extension | None = None) -> None:
        """Make a job that was seen to be over PENDING again. Raises CannotResume or JobNotFound."""
        assert seen.is_final, f"{job_id} is {seen}, it is not over"
        more: list[Any] = []
        if extension is not None:
            text, due = json.dumps(extension.config), extension.next_evaluation
            more = [text, payload_digest(text.encode()), extension.num_iterations, "" if due is None else due]
        outcome = (await self._run("resume_job", JobKeys(job_id), [], seen, *more)).decode()
        if not outcome:
            raise JobNotFound(job_id)
        if outcome != "resumed":
            raise CannotResume(job_id, outcome, f"it was {seen} a moment ago; look again")
        await self.file_job(job_id)

    async def delete_job(self, job_id: str) -> None:
        """Remove a final job and all of its keys. Raise JobNotFound or JobNotFinal.

        The job does not exist from the first step on. Repeating the call finishes a deletion that died half-way.
        """
        job = JobKeys(job_id)
        await self.file_job(job_id)  # the process that ended the job may have died before it filed it
        final = [state for state in JobState if state.is_final]
        outcome = (await self._run("delete_job", job, [job.deleted], *final)).decode()
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
        await self._finish_deletion(job_id)

    async def _finish_deletion(self, job_id: str) -> None:
        """Delete the record; a mark of it refuses the id for DELETED_ID_S."""
        deleted = JobKeys(job_id).deleted
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.delete(deleted)
        pipeline.hset(deleted, "deleted_at", await self.now())
        pipeline.expire(deleted, DELETED_ID_S)
        await pipeline.execute()
        await self.lists.remove(job_id)

    async def is_deleted(self, job_id: str) -> bool:
        """Return whether the job is being deleted, or was deleted within a day."""
        return bool(await self.redis.exists(JobKeys(job_id).deleted))

    async def forget_job(self, job_id: str) -> None:
        """Take an id without a job off all lists: its creator died before creating it."""
        if not await self.redis.exists(JobKeys(job_id).job):
            await self.lists.remove(job_id)

    async def claim_job(self, job_id: str, owner: str, lease_s: float) -> str | None:
        """Become the job's trainer; return the epoch that fences off earlier owners, or None if it is not free."""
        epoch = await self._run("claim_job", JobKeys(job_id), [], owner, lease_s)
        if epoch:
            await self.file_job(job_id)
        return epoch.decode() if epoch else None

    async def renew_job(self, job_id: str, epoch: str, lease_s: float, doing: str = "") -> JobState:
        """Renew the lease and return the job's state. Raise LeaseLost. `doing`: what its trainer does, for people."""
        state = await self._run("renew_job", JobKeys(job_id), [], epoch, lease_s, doing)
        if state is None:
            raise LeaseLost(f"job {job_id} has another trainer now")
        return JobState(state.decode())

    # ---- iterations ----------------------------------------------------------------------------------------------

    async def record_dtype(self, job_id: str, epoch: str, dtype: str, reason: str) -> str:
        """Record the dtype that the job computes in, once; return the recorded one. Raise LeaseLost."""
        recorded = await self._run("record_dtype", JobKeys(job_id), [], epoch, dtype, reason)
        if recorded is None:
            raise LeaseLost(f"job {job_id} has another trainer now")
        return str(recorded.decode())

    async def announce_version(
        self,
        job_id: str,
        epoch: str,
        version: int,
        address: str,
        digest: str,
        published: PublishedWeights | None = None,
    ) -> None:
        """Announce that the weights can be pulled at `address`; this publishes a job's first version. Raise LeaseLost.

        `published`: the version's numbers, if they are to be stored; those of its first announcement are kept.
        """
        job = JobKeys(job_id)
        args = (epoch, version, address, digest, "" if published is None else published.model_dump_json())
        outcome = (await self._run("announce_version", job, [job.weights(version)], *args)).decode()
        if outcome == "fenced":
            raise LeaseLost(f"job {job_id} has another trainer now")
        if outcome == "diverged":
            raise diverged(f"version {version}, made again,")

    async def open_iteration(self, job_id: str, iteration: int, version: int, tasks: list[PromptTask]) -> str:
        """Dispatch an iteration's fixed set of groups, all pinned to `version`, which must be the published one.

        Return '' or the reason why it was not opened: `max_staleness` bounds how far `version` may be behind.
        """
        job = JobKeys(job_id)
        pairs = [item for task in tasks for item in (task.group_id, pin_task(task, version).SerializeToString())]
        more_keys = [job.iteration(iteration), job.groups(iteration), job.prompts]
        reason = await self._run("open_iteration", job, more_keys, iteration, version, ROLLOUT_GROUP, *pairs)
        return cast(str, reason.decode())

    async def iteration_fields(self, job_id: str, iteration: int) -> dict[str, str]:
        """Return the iteration hash as text; empty when it was never opened."""
        fields = await self.redis.hgetall(JobKeys(job_id).iteration(iteration))
        return {name.decode(): value.decode() for name, value in fields.items()}

    async def groups(self, job_id: str, iteration: int) -> dict[str, str]:
        """Return group id -> `waiting:ENTRY` | `accepted:ENTRY`."""
        states = await self.redis.hgetall(JobKeys(job_id).groups(iteration))
        return {group_id.decode(): state.decode() for group_id, state in states.items()}

    async def iteration_state(self, job_id: str, iteration: int) -> IterationState | None:
        state = await self.redis.hget(JobKeys(job_id).iteration(iteration), "state")
        return IterationState(state.decode()) if state else None

    async def iteration_version(self, job_id: str, iteration: int) -> int | None:
        """Return the policy version that generates the iteration; None when it was never opened."""
        version = await self.redis.hget(JobKeys(job_id).iteration(iteration), "policy_version")
        return int(version) if version else None

    async def evaluation_state(self, job_id: str, evaluation: int) -> EvaluationState | None:
        """Return its state; None when it was not opened yet. The job may end when its last one `is_over`."""
        return await self.evaluations.state(job_id, evaluation)

    async def busy_seconds(self, job_id: str, iteration: int) -> dict[str, float]:
        """Return worker id -> seconds with at least one response in flight in that iteration."""
        busy = await self.redis.hgetall(JobKeys(job_id).busy(iteration))
        return {worker.decode(): float(seconds) for worker, seconds in busy.items()}

    async def ready_times(self, job_id: str) -> dict[int, float]:
        """Return policy version -> Unix time when the first rollout served it."""
        times = await self.redis.hgetall(JobKeys(job_id).versions)
        return {int(version): float(time) for version, time in times.items()}

    async def weights(self, job_id: str, version: int) -> WeightsRecord | None:
        """Return the numbers that trainer and rollouts have recorded for a policy version; None when there are none."""
        fields = await self.redis.hgetall(JobKeys(job_id).weights(version))
        fields.pop(b"digest", None)
        if not fields:
            return None
        published = json.loads(fields.pop(b"published", b"{}"))
        rollouts = {
            name.decode().removeprefix("rollout:"): WeightUpdate.model_validate_json(update)
            for name, update in sorted(fields.items())
        }
        return WeightsRecord(policy_version=version, rollouts=rollouts, **published)

    async def commit_iteration(
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
        """Close a drained iteration and publish `version`. Return False if it was committed before. Raise LeaseLost.

        `used`: the `used_digest` of the groups that the step was made of.

        Not `is_published`: rollouts stay on the version that they have; allowed while the next iteration can be opened
        on that one.

        `advantages`: group id -> the advantage of each response, for people; kept as long as the groups are.
        """
        job = JobKeys(job_id)
        args = (epoch, iteration, version, digest, json.dumps(metrics), "1" if is_published else "0", used)
        told = [word for group_id, own in (advantages or {}).items() for word in (group_id, json.dumps(own))]
        more_keys = [job.iteration(iteration), job.advantages(iteration)]
        outcome = (await self._run("commit_iteration", job, more_keys, *args, *told)).decode()
        if outcome == "fenced":
            raise LeaseLost(f"job {job_id} has another trainer now")
        if outcome == "diverged":
            raise diverged(f"replaying iteration {iteration}")
        assert outcome != "unbounded", f"version {version} must be published: the next iteration needs it"
        assert outcome in ("committed", "already"), f"iteration {iteration} is {outcome}"
        return bool(outcome == "committed")

    async def checkpointed(self, job_id: str, epoch: str, first: int, next_iteration: int, path: str) -> None:
        """Record iterations `first` to `next_iteration - 1` as durable: acknowledge their groups. Raise LeaseLost."""
        job = JobKeys(job_id)
        ledgers = [job.groups(iteration) for iteration in range(first, next_iteration)]
        args = (epoch, next_iteration, path, TRAINER_GROUP)
        if not await self._run("checkpointed", job, [job.rollouts, *ledgers], *args):
            raise LeaseLost(f"job {job_id} has another trainer now")

    async def trim_iteration(self, job_id: str, iteration: int, num_kept: int) -> bool:
        """Drop the groups of the oldest iteration that still has them, if `num_kept` newer ones are durable.

        Return False when another iteration is to be dropped first, or nothing yet.
        """
        job = JobKeys(job_id)
        for_replay = [job.micro_batches(iteration), job.taken(iteration)]
        more_keys = [job.rollouts, job.groups(iteration), *for_replay, job.advantages(iteration)]
        return bool(await self._run("trim_iteration", job, more_keys, iteration, num_kept))

    # ---- groups: the rollout's side ------------------------------------------------------------------------------

    async def claim_groups(self, job_id: str, worker: str, count: int, lease_s: float) -> list[Claim]:
        """Claim up to `count` prompts, those of dead workers first. This never blocks."""
        job = JobKeys(job_id)
        flat = await self._run("claim_groups", job, [job.prompts], worker, count, int(lease_s * 1000), ROLLOUT_GROUP)
        claims, foreign = [], []
        for entry, attempt, payload in zip(flat[::3], flat[1::3], flat[2::3], strict=True):
            try:
                claims.append(Claim(entry.decode(), int(attempt), decode_task(payload)))
            except ValueError:
                foreign.append(entry)
        listed = await self._states([self._place(job, claim.task) for claim in claims])
        foreign += [
            claim.entry_id
            for claim, state in zip(claims, listed, strict=True)
            if state != f"waiting:{claim.entry_id}".encode()
        ]
        await self._drop_foreign(job, job.prompts, ROLLOUT_GROUP, foreign)
        return [claim for claim in claims if claim.entry_id not in foreign]

    def _place(self, job: JobKeys, unit: PromptTask | RolloutGroup) -> tuple[str, str]:
        """Return the key of the group's ledger and its name there."""
        groups = job.evaluation_groups if unit.is_evaluation else job.groups
        return groups(unit.iteration), unit.group_id

    async def _states(self, places: list[tuple[str, str]]) -> list[bytes | None]:
        """Return the state of each group in its ledger."""
        pipeline = self.redis.pipeline(transaction=False)
        for key, group_id in places:
            pipeline.hget(key, group_id)
        return list(await pipeline.execute()) if places else []

    async def _drop_foreign(self, job: JobKeys, stream: str, group: str, entries: list[Any]) -> None:
        """Remove entries that another program wrote to one of our streams; count them and record an event."""
        if entries:
            await self._run("drop_foreign", job, [stream], group, *entries)

    async def wait_for_prompts(self, job_id: str, last_seen: str, timeout_s: float) -> str:
        """Block until the prompts stream grows past `last_seen` or time is up; return the new cursor."""
        answer = await self.redis.xread({JobKeys(job_id).prompts: last_seen}, block=max(1, int(timeout_s * 1000)))
        return cast(str, answer[0][1][-1][0].decode()) if answer else last_seen

    async def num_unclaimed_prompts(self, job_id: str) -> int:
        """Return how many prompts no rollout has claimed yet, including those of evaluations."""
        prompts = JobKeys(job_id).prompts
        pending = await self.redis.xpending(prompts, ROLLOUT_GROUP)
        return int(await self.redis.xlen(prompts)) - int(pending["pending"])

    async def check_streams(self, job_id: str) -> None:
        """Raise StreamLost when one of the job's two streams does not exist."""
        job = JobKeys(job_id)
        pipeline = self.redis.pipeline(transaction=False)
        for stream in (job.prompts, job.rollouts):
            pipeline.exists(stream)
        for name, is_there in zip(("prompts", "rollouts"), await pipeline.execute(), strict=True):
            if not is_there:
                raise StreamLost(job_id, name)

    async def renew_groups(self, job_id: str, worker: str, entry_ids: list[str]) -> list[str]:
        """Renew leases while generating; return the entries that are still this worker's."""
        return await self._settle_leases(job_id, worker, "renew", entry_ids)

    async def release_groups(
        self, job_id: str, worker: str, entry_ids: list[str], *, is_attempt: bool = False
    ) -> list[str]:
        """Hand leases back: another worker can claim them at once. `is_attempt`: the claim counts, the group failed."""
        return await self._settle_leases(job_id, worker, "fail" if is_attempt else "release", entry_ids)

    async def _settle_leases(self, job_id: str, worker: str, outcome: str, entry_ids: list[str]) -> list[str]:
        if not entry_ids:
            return []
        job = JobKeys(job_id)
        mine = await self._run("renew_groups", job, [job.prompts], worker, ROLLOUT_GROUP, outcome, *entry_ids)
        return [entry.decode() for entry in mine]

    async def submit_group(self, job_id: str, entry_id: str, group: RolloutGroup) -> Verdict:
        """Submit a finished (or failed) group. Raise ValueError when the group breaks its own promises."""
        check_group(group)
        check_token_lengths(group)
        job = JobKeys(job_id)
        number = group.iteration
        kind, keys_of_unit = (
            ("evaluation", (job.evaluation(number), job.evaluation_groups(number), job.evaluation_results(number)))
            if group.is_evaluation
            else ("iteration", (job.iteration(number), job.groups(number), job.rollouts))
        )
        unit, ledger, results = keys_of_unit
        more_keys = [unit, ledger, job.busy(number), job.prompts, results, job.lengths]
        versions = ",".join(map(str, span_versions(group)))
        payload = encode_group(group)
        args = (entry_id, group.worker_id, ROLLOUT_GROUP, number, group.group_id, payload)
        told = (versions, failure_text(group), group.timings.worker_busy_s, kind)
        more_args = (*told, payload_digest(payload), *length_of(group))
        if self._submit is None:
            self._submit = BatchedScript(self.redis, self.redis.register_script(load_script("submit_group")))
        verdict = await self._submit([job.job, job.events, *more_keys, job.audit], [*args, *more_args])
        return Verdict(verdict.decode())

    async def engine_ready(self, job_id: str, version: int, worker: str, update: WeightUpdate) -> None:
        """Record that a rollout serves `version`, and how it got it."""
        job = JobKeys(job_id)
        more_keys = [job.versions, job.weights(version)]
        await self._run("engine_ready", job, more_keys, version, worker, update.model_dump_json())

    # ---- groups: the trainer's side ------------------------------------------------------------------------------

    async def take_groups(self, job_id: str, consumer: str, count: int, timeout_s: float) -> list[RolloutGroup]:
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
            raise LeaseLost(f"job {job_id} was deleted") from error
        groups, foreign = {}, []
        for entry, fields in answer[0][1] if answer else []:
            try:
                groups[entry] = decode_group(fields[b"group"])
            except (ValueError, KeyError):
                foreign.append(entry)
        states = await self._states([self._place(job, group) for group in groups.values()])
        foreign += [entry for entry, state in zip(groups, states, strict=True) if state != b"accepted:" + entry]
        await self._drop_foreign(job, job.rollouts, TRAINER_GROUP, foreign)
        return [group for entry, group in groups.items() if entry not in foreign]

    async def record_micro_batch(
        self, job_id: str, epoch: str, iteration: int, rank: int, index: int, group_ids: list[str]
    ) -> list[str]:
        """Take groups for trainer replica `rank`: those that no replica has taken become its micro-batch `index`.

        Return the granted groups, in the given order; a repeated (rank, index) returns the same ones again. If none is
        granted, nothing is written, and the index is still free. Raise LeaseLost.
        """
        job = JobKeys(job_id)
        more_keys = [job.micro_batches(iteration), job.taken(iteration)]
        granted = await self._run("record_micro_batch", job, more_keys, epoch, f"{rank}:{index}", *group_ids)
        if granted is None:
            raise LeaseLost(f"job {job_id} has another trainer now")
        return granted.decode().split(",") if granted else []

    async def recorded_micro_batches(self, job_id: str, iteration: int) -> list[tuple[int, list[str]]]:
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

    async def iteration_groups(self, job_id: str, iteration: int) -> list[RolloutGroup]:
        """Return all accepted groups of an iteration in the order of the stream; for people and for replay.

        Raise GroupsTrimmed when they are no longer kept.
        """
        job = JobKeys(job_id)
        states = [state.decode() for state in await self.redis.hvals(job.groups(iteration))]
        entries = sorted(
            (state.removeprefix("accepted:") for state in states if state.startswith("accepted:")),
            key=lambda entry: tuple(map(int, entry.split("-"))),
        )
        if not entries:
            return []
        found = await self.redis.xrange(job.rollouts, entries[0], entries[-1])
        wanted = set(entries)
        groups = [decode_group(fields[b"group"]) for entry, fields in found if entry.decode() in wanted]
        if len(groups) < len(entries):
            first_kept = int(await self.redis.hget(job.job, "num_trimmed") or 0)
            if iteration < first_kept:
                raise GroupsTrimmed(job_id, iteration, first_kept)
        return groups

    async def advantages(self, job_id: str, iteration: int) -> dict[str, list[float | None]]:
        """Return group id -> each response's advantage as trained; empty before the commit, or if none are recorded."""
        told = await self.redis.hgetall(JobKeys(job_id).advantages(iteration))
        return {group_id.decode(): json.loads(own) for group_id, own in told.items()}

    async def lengths(self, job_id: str, rows: Sequence[int]) -> list[int | None]:
        """Return the mean tokens per response for each row of the data, when it was last generated; None if unknown."""
        found = await self.redis.hmget(JobKeys(job_id).lengths, rows) if rows else []
        return [None if length is None else int(length) for length in found]

    # ---- the audit log -------------------------------------------------------------------------------------------

    async def audit_entries(self, job_id: str, after: str = "-", count: int = 1000) -> list[audit.Entry]:
        """Return the next entries after the id `after`, oldest first; empty at the end."""
        start = after if after == "-" else f"({after}"
        found = await self.redis.xrange(JobKeys(job_id).audit, start, "+", count)
        return [
            audit.Entry(
                entry.decode(), *(fields.get(name, b"").decode(errors="replace") for name in (b"line", b"link"))
            )
            for entry, fields in found
        ]

    async def rollouts(self, job_id: str, after: str = "-", count: int = 64) -> list[tuple[str, bytes]]:
        """Return the next raw entries of the rollouts stream after the id `after`: (id, RolloutGroup)."""
        start = after if after == "-" else f"({after}"
        found = await self.redis.xrange(JobKeys(job_id).rollouts, start, "+", count)
        return [(entry.decode(), fields.get(b"group", b"")) for entry, fields in found]

    # ---- events and workers --------------------------------------------------------------------------------------

    async def emit(self, job_id: str, kind: str, message: str, data: dict[str, Any] | None = None) -> None:
        await self._run("emit_event", JobKeys(job_id), [], kind, message, json.dumps(data or {}))

    async def events(
        self, job_id: str, after: str = "0", timeout_s: float | None = None, count: int = 500
    ) -> list[Event]:
        """Return events after the cursor, oldest first; wait up to `timeout_s` for the first one."""
        block = None if timeout_s is None else max(1, int(timeout_s * 1000))
        answer = await self.redis.xread({JobKeys(job_id).events: after}, count=count, block=block)
        return [to_event(entry, fields) for entry, fields in answer[0][1]] if answer else []

    async def heartbeat(self, pool: str, worker: WorkerRecord) -> None:
        await self.redis.hset(keys.workers(pool), worker.id, worker.model_dump_json())

    async def remove_worker(self, pool: str, worker_id: str) -> None:
        await self.redis.hdel(keys.workers(pool), worker_id)

    async def workers(self, pool: str) -> list[WorkerRecord]:
        """Return the last heartbeats of a pool's rollouts, without unreadable ones."""
        return (await self.worker_heartbeats(pool)).records

    async def worker_heartbeats(self, pool: str) -> Heartbeats[WorkerRecord]:
        return read_heartbeats(await self.redis.hgetall(keys.workers(pool)), WorkerRecord)


def diverged(what: str) -> JobFailed:
    return JobFailed(
        f"{what} gave other bits than the weights that rollouts were given: device, number of threads or number of "
        "trainer ranks have changed since. Submit the job again; with checkpoint.every_iterations = 1 nothing has to "
        "be replayed"
    )


def failure_text(group: RolloutGroup) -> str:
    return f"{group.failure.kind}: {group.failure.message}" if group.HasField("failure") else ""


def length_of(group: RolloutGroup) -> tuple[int | str, int]:
    """Return the row of the data and the mean tokens per response; '' and 0 where not needed or not known."""
    if not group.HasField("data_row") or not group.responses:
        return "", 0
    return group.data_row, round(fmean(len(response.token_ids) for response in group.responses))


def to_event(entry: bytes, fields: dict[bytes, bytes]) -> Event:
    """Return the event, or one that says that it cannot be read: readers go on after it, and people see it."""
    event_id = entry.decode()
    try:
        return Event(
            id=event_id,
            time=float(fields[b"time"]),
            kind=fields[b"kind"].decode(),
            message=fields[b"message"].decode(),
            data=json.loads(fields[b"data"]) or {},
        )
    except (ValueError, KeyError, RecursionError):
        message = "an entry of this stream is no event: another version of Onbeat or somebody else wrote it"
        return Event(id=event_id, time=int(event_id.split("-")[0]) / 1000, kind=UNREADABLE_EVENT, message=message)
