"""The lockstep feed of sharded replicas: rank 0 takes groups from the stream and deals them out, balanced by tokens.

Every forward and backward of a sharded model is a collective, so all ranks see the same micro-batches in the same
order, each with its own share of them. A rank with fewer rows than another runs idle passes.
"""

from collections.abc import Collection, Iterator
from typing import Protocol

from onbeat.config import JobConfig
from onbeat.streams.codec import RolloutGroup, decode_group
from services.trainer.batch import cost
from services.trainer.feed import GroupFeed
from services.trainer.job.interface import TrainingJob
from services.trainer.model.sharding import deal
from services.trainer.world import World


class Feed(Protocol):
    def micro_batches(self, iteration: int, wanted: Collection[str]) -> Iterator[list[RolloutGroup]]: ...


def create_feed(job: TrainingJob, config: JobConfig, next_iteration: int, world: World, is_sharded: bool) -> Feed:
    """Create the feed: whole replicas take from the stream at their own pace; sharded ones get theirs from rank 0."""
    if not is_sharded:
        return GroupFeed(job, config, next_iteration, num_replicas=world.size)
    budget = config.training.max_tokens_per_micro_batch * world.size
    training = config.training.model_copy(update={"max_tokens_per_micro_batch": budget})
    for_all = config.model_copy(update={"training": training})
    return LockstepFeed(world, GroupFeed(job, for_all, next_iteration) if world.is_main else None, config)


class LockstepFeed:
    """A feed for all ranks together. Only rank 0 has the `feed` that takes groups from the stream."""

    def __init__(self, world: World, feed: GroupFeed | None, config: JobConfig) -> None:
        assert (feed is not None) == world.is_main
        self._world, self._feed, self._config = world, feed, config

    def micro_batches(self, iteration: int, wanted: Collection[str]) -> Iterator[list[RolloutGroup]]:
        """Yield this rank's share of each micro-batch; it may be empty."""
        if self._feed is not None:
            for groups in self._feed.micro_batches(iteration, wanted):
                for group in groups:
                    self._world.broadcast_bytes(group.SerializeToString())
                self._world.broadcast_bytes(b"")  # the micro-batch is complete
                yield self._share(groups)
            self._world.broadcast_bytes(b"")  # an empty one: there are no more
            return
        while groups := list(map(decode_group, iter(lambda: self._world.broadcast_bytes(None), b""))):
            yield self._share(groups)

    def _share(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        shares = deal([cost(group, self._config) for group in groups], self._world.size)
        return [groups[index] for index in shares[self._world.rank]]
