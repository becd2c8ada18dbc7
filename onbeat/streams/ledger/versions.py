"""The policy versions of the ledger: announced by the trainer, served by rollouts."""

import json

from onbeat.contracts.errors import JobFailed
from onbeat.contracts.records import PublishedWeights, WeightsRecord, WeightUpdate
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger.scripts import LedgerPart


class Versions(LedgerPart):
    """The policy versions of all jobs."""

    async def announce(
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
        if await self._run_as_owner("announce_version", job, [job.weights(version)], *args) == b"diverged":
            raise diverged(f"version {version}, made again,")

    async def engine_ready(self, job_id: str, version: int, worker: str, update: WeightUpdate) -> None:
        """Record that a rollout serves `version`, and how it got it."""
        job = JobKeys(job_id)
        more_keys = [job.versions, job.weights(version)]
        await self._run("engine_ready", job, more_keys, version, worker, update.model_dump_json())

    async def ready_times(self, job_id: str) -> dict[int, float]:
        """Return policy version -> Unix time when the first rollout served it."""
        times = await self.redis.hgetall(JobKeys(job_id).versions)
        return {int(version): float(time) for version, time in times.items()}

    async def digest(self, job_id: str, version: int) -> str:
        """Return the digest of a version, as announced by the trainer; "" when it has not been announced."""
        digest: bytes | None = await self.redis.hget(JobKeys(job_id).weights(version), "digest")
        return "" if digest is None else digest.decode()

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


def diverged(work: str) -> JobFailed:
    return JobFailed(
        f"{work} gave other bits than the weights that rollouts were given: device, number of threads or number of "
        "trainer ranks have changed since. Submit the job again; with checkpoint.every_iterations = 1 nothing has to "
        "be replayed"
    )
