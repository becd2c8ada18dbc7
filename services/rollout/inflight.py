"""The groups that this rollout has claimed and not yet submitted, and the leases that keep them its own."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from onbeat.streams.ledger import Claim


class Stage(StrEnum):
    """WAITING (for its policy version) -> GENERATING -> SCORING -> SUBMITTING."""

    WAITING = "WAITING"
    GENERATING = "GENERATING"
    SCORING = "SCORING"
    SUBMITTING = "SUBMITTING"


@dataclass(eq=False)
class Flight:
    """One claimed group on its way."""

    claim: Claim
    stage: Stage = Stage.WAITING
    is_lost: bool = False  # another worker has it, or it is accepted: nothing to hand back
    task: asyncio.Task[None] = field(init=False, repr=False)  # set when it is launched


class FlightTable:
    """Flights by stream entry."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def __contains__(self, entry_id: str) -> bool:
        return entry_id in self._flights

    def __iter__(self) -> Iterator[Flight]:
        return iter(list(self._flights.values()))

    def add(self, flight: Flight) -> None:
        assert flight.claim.entry_id not in self._flights
        self._flights[flight.claim.entry_id] = flight

    def remove(self, flight: Flight) -> None:
        del self._flights[flight.claim.entry_id]

    def num_before_scoring(self) -> int:
        """Groups that use the engine or are about to."""
        return sum(flight.stage in (Stage.WAITING, Stage.GENERATING) for flight in self)

    def tasks(self) -> set[asyncio.Task[None]]:
        return {flight.task for flight in self}

    def done(self) -> list[Flight]:
        return [flight for flight in self if flight.task.done()]

    def entry_ids(self) -> list[str]:
        return list(self._flights)


def num_claimable(flights: FlightTable, capacity: int, num_samples: int, num_prompts: int, num_workers: int) -> int:
    """How many more groups to claim.

    `capacity` responses fit into the engine; a group of `num_samples` (G) takes G, and one group more waits inside the
    engine: a place is refilled when its response ends, not when its whole group does. Of an iteration's `num_prompts`
    groups a worker generates at most its share at a time, or the first one to ask would leave nothing to the others: 8
    prompts and 2 workers are 4 at a time each, and who is faster comes back sooner. Groups that are being scored hold
    no place in the engine, but no more than twice its capacity may pile up.
    """
    num_generating = flights.num_before_scoring()
    slots = capacity // num_samples + 1
    share = -(-num_prompts // num_workers)
    return max(0, min(slots, share, 2 * slots - len(flights) + num_generating) - num_generating)
