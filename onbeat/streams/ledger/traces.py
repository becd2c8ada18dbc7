"""The record of how far each job's iterations have been exported as OpenTelemetry traces."""

from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger.scripts import Part

KEEP_S = 86_400  # a record that no broker reads or writes expires, also one of a job that was just deleted


class Traces(Part):
    """The exports of all jobs of one Redis."""

    async def recorded(self, job_id: str) -> int:
        """Return the first iteration that is left to export; 0 if none has been exported."""
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.hget(JobKeys(job_id).traces, "next_iteration")
        pipeline.expire(JobKeys(job_id).traces, KEEP_S)
        return int((await pipeline.execute())[0] or 0)

    async def record(self, job_id: str, next_iteration: int) -> None:
        """Record that all iterations before `next_iteration` are exported, or left out."""
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.hset(JobKeys(job_id).traces, "next_iteration", next_iteration)
        pipeline.expire(JobKeys(job_id).traces, KEEP_S)
        await pipeline.execute()
