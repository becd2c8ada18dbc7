"""The groups of a live job as one replica takes them: from the stream, and after a crash those taken before it."""

from collections.abc import Container

from onbeat.streams.codec import RolloutGroup
from onbeat.types import IterationState
from services.trainer.job.lease import Lease


class GroupSource:
    """The source of a replica's groups. Every method raises LeaseLost once another trainer owns the job."""

    def __init__(self, lease: Lease) -> None:
        self._lease, self._ledger, self._job = lease, lease.ledger, lease.job
        self._consumer = f"rank-{self._job.rank}"  # stable, so that a successor finds what its predecessor had taken
        self._num_recorded: dict[int, int] = {}  # iteration -> micro-batches under this rank

    def take(self, count: int, timeout_s: float) -> list[RolloutGroup]:
        """Return up to `count` accepted groups in completion order, or an empty list when none came in time."""
        return self._lease.run(self._ledger.trainer.take(self._job.id, self._consumer, count, timeout_s))

    def accepted(self, first_iteration: int, known: Container[str] = ()) -> list[RolloutGroup]:
        """Return the accepted groups from an iteration on, in completion order, including those taken before. Those
        that are `known` (ids) are not read."""

        async def collect() -> list[RolloutGroup]:
            num_opened = int((await self._ledger.jobs.fields(self._job.id))["num_opened"])
            groups = []
            for iteration in range(first_iteration, num_opened):
                groups += await self._ledger.iterations.accepted_groups(self._job.id, iteration, known)
            return groups

        return self._lease.run(collect())

    def policy_version(self, iteration: int) -> int:
        """Return the one policy version of an open iteration."""
        version = self._lease.run(self._ledger.iterations.policy_version(self._job.id, iteration))
        assert version is not None, f"iteration {iteration} is not open"
        return version

    def dispatched(self, iteration: int) -> set[str]:
        """Return the ids of all groups of the iteration so far; none before it is open."""
        return set(self._lease.run(self._ledger.iterations.groups(self._job.id, iteration)))

    def is_drained(self, iteration: int) -> bool:
        """Return whether every group of the iteration is accepted."""
        return self._lease.run(self._ledger.iterations.state(self._job.id, iteration)) is not IterationState.OPEN

    def recorded_micro_batches(self, iteration: int) -> list[list[str]]:
        """Return the micro-batches of this replica and of replicas that have gone, in the order of recording."""
        recorded = self._lease.run(self._ledger.iterations.micro_batches(self._job.id, iteration))
        self._num_recorded = {iteration: sum(rank == self._job.rank for rank, _ in recorded)}
        return [group_ids for rank, group_ids in recorded if rank % self._job.num_replicas == self._job.rank]

    def taken(self, iteration: int) -> set[str]:
        """Return the ids of the groups that are in a micro-batch of any replica."""
        return self._lease.run(self._ledger.iterations.taken_groups(self._job.id, iteration))

    def record_micro_batch(self, iteration: int, group_ids: list[str]) -> list[str]:
        """Record, before it is trained, what this replica trains next. Return the groups that were still free."""
        index, job = self._num_recorded.get(iteration, 0), self._job
        recording = self._ledger.trainer.record_micro_batch(job.id, job.epoch, iteration, job.rank, index, group_ids)
        granted = self._lease.run(recording)
        self._num_recorded[iteration] = index + bool(granted)
        return granted
