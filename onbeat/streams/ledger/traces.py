"""The record of which iterations have been exported as OpenTelemetry traces, and by which broker: none is exported
twice."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger.scripts import Part
from onbeat.types import JobState


@dataclass(frozen=True)
class TracedJob:
    job_id: str
    state: JobState
    num_committed: int  # iterations
    num_exported: int  # exported ones, or those left out
    finished_at: float | None  # Unix seconds


class Traces(Part):
    """The trace exports of all jobs of one Redis."""

    async def jobs(self, job_ids: Sequence[str]) -> list[TracedJob]:
        """Return the progress of those jobs that exist, in one round trip."""
        pipeline = self.redis.pipeline(transaction=False)
        for job_id in job_ids:
            pipeline.hmget(JobKeys(job_id).job, "state", "next_iteration", "finished_at", "first_iteration")
            pipeline.hget(JobKeys(job_id).traces, "next_iteration")
        found = await pipeline.execute() if job_ids else []
        jobs = []
        for job_id, (state, num_committed, finished_at, first_iteration), num_exported in zip(
            job_ids, found[::2], found[1::2], strict=True
        ):
            with contextlib.suppress(ValueError):  # a record that cannot be read has no traces
                job = TracedJob(
                    job_id=job_id,
                    state=JobState((state or b"").decode()),
                    num_committed=int(num_committed or 0),
                    num_exported=int(num_exported or first_iteration or 0),
                    finished_at=float(finished_at) if finished_at else None,
                )
                jobs.append(job)
        return jobs

    async def hold(self, job_id: str, broker: str, lease_s: float, next_iteration: int | None = None) -> int | None:
        """Take or keep the job; return the first iteration that is left to export. Return None, and write nothing, when
        another broker has it or there is no such job.

        `next_iteration`: all before it are exported. A lease of 0 gives the job back.
        """
        job = JobKeys(job_id)
        done = "" if next_iteration is None else next_iteration
        left = await self._run("hold_traces", job, [job.traces], broker, lease_s, done)
        return None if left is None else int(left)
