"""Breadth first over all worlds, so that the first trace found is a shortest one."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import redis

from onbeat.contracts.states import JobState
from tests.model.actors import Actors, World, first_world
from tests.model.bounds import Bounds
from tests.model.invariants import Violation, check_call, first_iteration
from tests.model.store import State, Store


@dataclass(frozen=True)
class Report:
    num_worlds: int
    num_moves: int
    num_redis_states: int
    num_calls: int  # calls of scripts, on a real Redis
    num_ended: int  # worlds whose job is final
    violation: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        numbers = (
            f"{self.num_worlds} worlds, {self.num_moves} moves between them, {self.num_redis_states} states in Redis"
        )
        numbers += f", {self.num_calls} calls of scripts, {self.num_ended} worlds ended"
        steps = [f"{place:3} {label}" for place, label in enumerate(self.trace, 1)]
        return "\n".join([numbers, *steps, self.violation] if self.violation else [numbers])


class Search:
    def __init__(self, client: redis.Redis, bounds: Bounds, mutate: Callable[[str], str] = lambda text: text) -> None:
        self._store = Store(client, bounds, check_call, mutate)
        self._actors = Actors(self._store, bounds)
        self._worlds = [first_world(bounds)]
        self._numbers = {self._worlds[0]: 0}
        self._came_from: list[tuple[int, str]] = [(0, "")]
        self._hoped_from: list[list[int]] = [[]]  # per world: those that lead to it without a fault or a cancel
        self._num_moves = 0

    def run(self) -> Report:
        """Search until every state was seen, or one is wrong."""
        number = 0
        try:
            while number < len(self._worlds):
                self._expand(number)
                number += 1
            if (stuck := self._find_stuck()) is not None:
                number = stuck
                raise Violation("from here the job cannot end any more, whatever anybody does")
        except Violation as violation:
            return self._report(str(violation), self._trace(number))
        finally:
            self._store.close()
        return self._report()

    def _expand(self, number: int) -> None:
        world = self._worlds[number]
        check_disk(world, self._store.states[world.redis])
        for move in self._actors.moves(world):
            self._num_moves += 1
            after = settle(move.world)
            target = self._numbers.setdefault(after, len(self._worlds))
            if target == len(self._worlds):
                self._worlds.append(after)
                self._came_from.append((number, move.label))
                self._hoped_from.append([])
            if not move.kind:
                self._hoped_from[target].append(number)

    def _find_stuck(self) -> int | None:
        """Return the first world from which no end can be reached."""
        hopeful = [self._is_end(world) for world in self._worlds]
        queue = deque(number for number, is_end in enumerate(hopeful) if is_end)
        while queue:
            for number in self._hoped_from[queue.popleft()]:
                if not hopeful[number]:
                    hopeful[number] = True
                    queue.append(number)
        return hopeful.index(False) if False in hopeful else None

    def _is_end(self, world: World) -> bool:
        return self._state(world).is_final

    def _state(self, world: World) -> JobState:
        return JobState(self._store.states[world.redis].view.job["state"])

    def _trace(self, number: int) -> tuple[str, ...]:
        labels = []
        while number:
            number, label = self._came_from[number]
            labels.append(label)
        return tuple(reversed(labels))

    def _report(self, violation: str = "", trace: tuple[str, ...] = ()) -> Report:
        num_ended = sum(map(self._is_end, self._worlds))
        sizes = (len(self._worlds), self._num_moves, len(self._store.states), self._store.num_calls, num_ended)
        return Report(*sizes, violation, trace)


def settle(world: World) -> World:
    """Brokers are alike, and so are trainers: whose turn it was does not matter."""
    return world._replace(
        brokers=tuple(sorted(world.brokers, key=repr)), trainers=tuple(sorted(world.trainers, key=repr))
    )


def check_disk(world: World, state: State) -> None:
    """Check that a checkpoint holds the committed weights, and that an acknowledged one and the end are on disk."""
    view, disk = state.view, world.disk
    if disk.next_iteration > first_iteration(view):
        committed = view.iterations[disk.next_iteration - 1].get("weights_digest")
        if committed != disk.digest:
            raise Violation(f"checkpoint {disk.next_iteration} holds {disk.digest}, committed is {committed}")
    if int(view.job.get("checkpoint_iteration", "0")) > disk.next_iteration:
        raise Violation(f"acknowledged is checkpoint {view.job['checkpoint_iteration']}, on disk {disk.next_iteration}")
    if view.job["state"] == JobState.SUCCEEDED and disk.next_iteration < view.num_iterations:
        raise Violation(f"the job succeeded, on disk is checkpoint {disk.next_iteration}")
