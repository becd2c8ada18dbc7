"""The calls of a rollout: claim prompts, keep their leases, submit groups."""

import json
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from onbeat.contracts.errors import StreamLost
from onbeat.contracts.intervals import Interval
from onbeat.contracts.states import Verdict
from onbeat.streams.codec import (
    PromptTask,
    RolloutGroup,
    check_group,
    check_token_lengths,
    decode_task,
    encode_group,
    payload_digest,
    span_versions,
)
from onbeat.streams.keys import ROLLOUT_GROUP, JobKeys
from onbeat.streams.ledger.batching import BatchedScript
from onbeat.streams.ledger.scripts import LedgerPart, load_script
from onbeat.streams.outcomes import Outcome
from onbeat.streams.signal import Signal

BY_REWARD = Signal()
MAX_INTERVALS = 64  # intervals in the engine, of one group; rollouts send fewer


@dataclass(frozen=True)
class Claim:
    """A claimed prompt. It is this worker's until the lease expires unrenewed."""

    entry_id: str
    attempt: int  # 1 for the first claim; claims that ended through no fault of the group do not count
    task: PromptTask
    lost_rollouts: tuple[str, ...] = ()  # ids of the rollouts that died or fell silent while they had it, oldest first


class RolloutSide(LedgerPart):
    """The ledger as rollouts use it."""

    def __init__(self, redis: Any) -> None:
        super().__init__(redis)
        self._submission = BatchedScript(redis, redis.register_script(load_script("submit_group")))

    async def claim(self, job_id: str, worker: str, count: int, lease_s: float) -> list[Claim]:
        """Claim up to `count` prompts, those of dead workers first. This never blocks."""
        job = JobKeys(job_id)
        more_keys, args = [job.prompts, job.lost_rollouts], (worker, count, int(lease_s * 1000), ROLLOUT_GROUP)
        flat = await self._run("claim_groups", job, more_keys, *args)
        attempts = dict(zip(flat[::4], map(int, flat[1::4]), strict=True))
        lost = {entry: tuple(json.loads(ids or "[]")) for entry, ids in zip(flat[::4], flat[3::4], strict=True)}
        tasks = await self._own_entries(job, job.prompts, decode_task, dict(zip(flat[::4], flat[2::4], strict=True)))
        return [Claim(entry.decode(), attempts[entry], task, lost[entry]) for entry, task in tasks.items()]

    async def wait_for_prompts(self, job_id: str, last_seen: str, timeout_s: float) -> str:
        """Block until the prompts stream grows past `last_seen` or time is up; return the new cursor."""
        prompts, block_ms = JobKeys(job_id).prompts, max(1, int(timeout_s * 1000))
        answer = await self.redis.xread({prompts: last_seen}, count=1, block=block_ms)  # all would be much to read
        if not answer:
            return last_seen
        newest = await self.redis.xrevrange(prompts, count=1) or answer[0][1]  # accepted prompts are removed
        entry_id: bytes = newest[0][0]
        return entry_id.decode()

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

    async def renew(self, job_id: str, worker: str, entry_ids: list[str]) -> list[str]:
        """Renew leases while generating; return the entries that are still this worker's."""
        return await self._settle_leases(job_id, worker, "renew", entry_ids) if entry_ids else []

    async def release(
        self, job_id: str, worker: str, entry_ids: list[str], *, is_attempt: bool = False, num_discarded_tokens: int = 0
    ) -> list[str]:
        """Hand leases back: another worker can claim them at once. `is_attempt`: the claim counts, the group failed.

        num_discarded_tokens: the job counts them; they were generated for these groups, or others that are over.
        """
        if not entry_ids and not num_discarded_tokens:
            return []
        outcome = "fail" if is_attempt else "release"
        return await self._settle_leases(job_id, worker, outcome, entry_ids, num_discarded_tokens)

    async def _settle_leases(
        self, job_id: str, worker: str, outcome: str, entry_ids: list[str], num_discarded_tokens: int = 0
    ) -> list[str]:
        job, args = JobKeys(job_id), (worker, ROLLOUT_GROUP, outcome, num_discarded_tokens, *entry_ids)
        renewed = await self._run("renew_groups", job, [job.prompts], *args)
        return [entry.decode() for entry in renewed]

    async def submit(
        self,
        job_id: str,
        entry_id: str,
        group: RolloutGroup,
        signal: Signal = BY_REWARD,
        outcome: Outcome | None = None,
    ) -> Verdict:
        """Submit a finished (or failed) group. Raise ValueError when the group breaks its own promises.

        `signal`: the job's, which decides whether another prompt takes the group's place. `outcome`: of the group,
        where later prompts are chosen by it.
        """
        check_group(group)
        check_token_lengths(group)
        job = JobKeys(job_id)
        number = group.iteration
        if group.is_evaluation:
            unit, ledger = job.evaluation(number), job.evaluation_groups(number)
            kind, results = "evaluation", job.evaluation_results(number)
        else:
            unit, ledger = job.iteration(number), job.groups(number)
            kind, results = "iteration", job.rollouts
        more_keys = [unit, ledger, job.busy(number), job.prompts, results, job.lengths, job.spares(number)]
        more_keys += [job.lost_rollouts, job.outcomes(number)]
        versions = ",".join(map(str, span_versions(group)))
        payload = encode_group(group)
        args: list[Any] = [entry_id, group.worker_id, ROLLOUT_GROUP, number, group.group_id, payload]
        args += [versions, failure_text(group), group.timings.worker_busy_s, kind]
        args += [
            payload_digest(payload),
            *length_of(group),
            int(signal.is_in(group)),
            json.dumps(generated_ago(group)),
            group.source,
            str(outcome or ""),
        ]
        verdict = await self._submission([job.job, job.events, *more_keys, job.audit], args)
        return Verdict(verdict.decode())


def failure_text(group: RolloutGroup) -> str:
    return f"{group.failure.kind}: {group.failure.message}" if group.HasField("failure") else ""


def generated_ago(group: RolloutGroup) -> list[Interval]:
    """Return when the group was in the engine: the seconds from the start of each interval, and from its end, to now.

    A group that was generated in 3 s and then scored in 1 s: [(4.0, 1.0)].
    """
    timings = group.timings
    taken_s = timings.generate_s + timings.score_s
    if timings.in_engine:
        intervals = timings.in_engine[:MAX_INTERVALS]
        return [(taken_s - interval.start_s, max(0.0, taken_s - interval.end_s)) for interval in intervals]
    return [(taken_s, timings.score_s)] if timings.generate_s > 0 else []


def length_of(group: RolloutGroup) -> tuple[int | str, int]:
    """Return the row of the data and the mean tokens per response; '' and 0 where not needed or not known."""
    if not group.HasField("data_row") or not group.responses:
        return "", 0
    return group.data_row, round(fmean(len(response.token_ids) for response in group.responses))
