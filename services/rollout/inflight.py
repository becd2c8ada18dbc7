"""The groups that this rollout has claimed and not yet submitted, and the leases that keep them its own."""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from onbeat.contracts.records import EpisodeWait
from onbeat.streams.codec import PromptTask
from onbeat.streams.ledger import Claim


class Stage(StrEnum):
    """The stages are WAITING (for its policy version) -> GENERATING -> SCORING -> SUBMITTING."""

    WAITING = "WAITING"
    GENERATING = "GENERATING"
    SCORING = "SCORING"
    SUBMITTING = "SUBMITTING"


class GroupEpisodes(Protocol):
    """The episodes of one group, as its flight sees them while they are played."""

    @property
    def doing(self) -> str: ...
    @property
    def wait(self) -> EpisodeWait | None: ...
    @property
    def num_waiting(self) -> int: ...  # episodes that hold no place in the engine
    @property
    def is_unanswered(self) -> bool: ...  # the engine has been asked, and has never answered


@dataclass(eq=False)
class Flight:
    """One claimed group on its way."""

    claim: Claim
    stage: Stage = Stage.WAITING
    episodes: GroupEpisodes | None = field(default=None, repr=False)  # while they are played
    num_tokens: int = 0  # sampled for it so far, as far as the engine reports those of calls that were cancelled
    is_lost: bool = False  # another worker has it, or it is accepted: nothing to hand back
    failed_episodes: Counter[str] = field(default_factory=Counter)  # numbers by kind, earlier attempts included
    task: asyncio.Task[None] = field(init=False, repr=False)  # set when it is launched

    @property
    def doing(self) -> str:
        """The wait of one of its episodes for the environment, in words; '' when there is nothing to say."""
        return self.episodes.doing if self.episodes is not None else ""

    @property
    def wait(self) -> EpisodeWait | None:
        return self.episodes.wait if self.episodes is not None else None

    @property
    def num_places(self) -> int:
        """The places in the engine that its responses hold, or are about to take."""
        num_waiting = self.episodes.num_waiting if self.episodes is not None else 0
        return self.claim.task.num_samples - num_waiting


@dataclass(frozen=True)
class RoundSize:
    """The size of an iteration, or of an evaluation."""

    num_prompts: int  # prompts that are published together
    num_samples: int  # responses of one prompt (G)


def num_claimable(
    flights: Collection[Flight],
    capacity: int,
    training: RoundSize,
    evaluation: RoundSize | None,
    num_workers: int,
    num_playable: int | None = None,
) -> int:
    """Return how many more groups to claim now. Which kind comes next is not known: each claim is as careful as the
    larger group and the smaller share demand, and the next one corrects it.

    `capacity` responses fit into the engine, and one group more waits inside it: a place is refilled when its response
    ends, not when its whole group does. A worker generates at most its share of an iteration's groups at a time, or the
    first one to ask would leave nothing to the others: 8 prompts and 2 workers are 4 at a time each, and the faster
    one comes back sooner. Groups left of the previous iteration do not count: the engine stays full. Groups that are
    being scored hold no place in the engine, but no more than twice its capacity may pile up.

    Episodes that wait for their environment hold no place either. Their groups are bounded by `num_playable`: so many
    can be played at a time; None for jobs without episodes. In a job that has prompts of one turn, too, any of the next
    ones may need an environment, so that none is claimed until one more can be played. The flights come in the order of
    their claims.
    """
    sizes = {False: training, True: evaluation or training}
    largest = max(size.num_samples for size in sizes.values())
    shares = {kind: -(-size.num_prompts // num_workers) for kind, size in sizes.items()}
    generating = [flight for flight in flights if flight.stage in (Stage.WAITING, Stage.GENERATING)]
    num_free = (capacity + largest - num_places(generating)) // largest
    num_tolerable = (2 * (capacity // largest + 1) * largest - num_places(flights)) // largest
    share_left = min(shares.values())
    if num_playable is not None:
        num_played = sum(flight.claim.task.HasField("environment") for flight in generating)
        num_free = min(num_free, num_playable - num_played)
    if generating:
        newest = generating[-1].claim.task
        num_newest = sum(is_together(flight.claim.task, newest) for flight in generating)
        share_left = min(share_left, shares[newest.is_evaluation] - num_newest)
    return max(0, min(num_free, num_tolerable, share_left))


def num_places(flights: Iterable[Flight]) -> int:
    return sum(flight.num_places for flight in flights)


def is_together(one: PromptTask, other: PromptTask) -> bool:
    """Return whether both are of the same iteration, or of the same evaluation."""
    return (one.is_evaluation, one.iteration) == (other.is_evaluation, other.iteration)
