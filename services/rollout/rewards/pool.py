"""The scoring processes: child processes that answer as child.py says, started on first use and kept warm. A reward
that hangs or crashes takes only its own process with it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from onbeat.contracts.rewards import MAX_REWARDS
from onbeat.process.children import ChildDied, ChildProcess
from services.rollout.children.answers import Answer, Loaded, OutOfStep, receive_answer
from services.rollout.deadlines import LOAD_S
from services.rollout.rewards.outcome import Number, RewardRefused, RewardRequest, RewardUnavailable, Score

CODE = "the reward"  # subject of messages


class LoadedReward(Loaded):
    takes_group: bool


class Scored(Answer):
    step: Literal["scored"]
    position: int
    reward: Number | None  # None: no opinion
    parts: dict[str, Number]


class Failed(Answer):
    step: Literal["failed"]
    position: int
    kind: Literal["load", "options", "raised", "invalid", "memory"]
    message: str


ANSWER: TypeAdapter[LoadedReward | Scored | Failed] = TypeAdapter(
    Annotated[LoadedReward | Scored | Failed, Field(discriminator="step")]
)


@dataclass(frozen=True)
class Limits:
    """The limits that one process has for all its life; see docs/rewards.md. `timeout_s`: of one response."""

    timeout_s: float
    memory_mb: int


class RewardProcess:
    """A process that scores the responses of one request after another."""

    def __init__(self, child: ChildProcess, limits: Limits) -> None:
        self.limits = limits
        self.child = child
        self._num_requests = 0

    @classmethod
    async def start(cls, limits: Limits) -> "RewardProcess":
        """Start a process. Raises RewardUnavailable."""
        arguments = ("services.rollout.rewards.child", str(limits.timeout_s), str(limits.memory_mb))
        try:
            child = await ChildProcess.start("the scoring process", *arguments)
        except OSError as error:
            raise RewardUnavailable("crashed", f"no scoring process could be started: {error}") from error
        return cls(child, limits)

    async def score(self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score]) -> None:
        """Score the responses at `indexes` into `scores`. Raises RewardError at the first that has no score; a function
        of the whole group scores all of them or none."""
        self._num_requests += 1
        message = {
            "request": self._num_requests,
            "reward": request.name,
            "options": request.options,
            "context": request.context,
            "responses": request.responses,
            "positions": list(indexes),
        }
        with living(indexes[0], "the scoring process did not take the request"):
            await self.child.send(message, LOAD_S)
        with living(indexes[0], f"importing {request.name} took longer than {LOAD_S:g} s"):
            loaded = await self._receive(LOAD_S, indexes[0])
            if not isinstance(loaded, LoadedReward):
                raise OutOfStep(CODE)
        num_scored = len(request.responses) if loaded.takes_group else 1  # responses that a call scores
        limit_s, of_call = self.limits.timeout_s * num_scored, {} if loaded.takes_group else scores
        late = f"scoring took longer than {limit_s:g} s" + f" for {num_scored} responses" * loaded.takes_group
        for index in indexes:
            place = None if loaded.takes_group else index
            with living(place, late):
                answer = await self._receive(limit_s, place)
                if not isinstance(answer, Scored) or answer.position != index:
                    raise OutOfStep(CODE)
            of_call[index] = Score(answer.reward, answer.parts)
        scores.update(of_call)

    async def _receive(self, timeout_s: float, index: int | None) -> LoadedReward | Scored:
        answer = await receive_answer(self.child, ANSWER, self._num_requests, timeout_s, CODE)
        if not isinstance(answer, Failed):
            return answer
        failure = RewardUnavailable if answer.kind == "memory" else RewardRefused
        raise failure(answer.kind, answer.message, index)


@contextmanager
def living(index: int | None, late: str) -> Iterator[None]:
    """Raise RewardUnavailable for this response (None: the group) when the process dies, or does not answer in time."""
    try:
        yield
    except TimeoutError as error:
        raise RewardUnavailable("timeout", late, index) from error
    except ChildDied as error:
        raise RewardUnavailable("crashed", str(error), index) from error


class RewardPool:
    """A pool of at most `num_processes` at a time; further requests wait their turn. Idle ones are kept for each of the
    limits that a job's rewards have."""

    def __init__(self, num_processes: int) -> None:
        self._turns, self._max_idle = asyncio.Semaphore(num_processes), MAX_REWARDS * num_processes
        self._idle: list[RewardProcess] = []

    async def score(
        self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score], deadline: float
    ) -> None:
        """Try once: put the scores of the responses at `indexes` into `scores`. Raises RewardError; scores that were
        there before an error are kept. The caller cancels this soon after the deadline."""
        async with self._turns:
            process = await self._take(Limits(request.timeout_s, request.memory_limit_mb))
            is_reusable = False
            try:
                await process.score(request, indexes, scores)
                is_reusable = True
            except RewardRefused:  # the process is as good as before
                is_reusable = True
                raise
            finally:  # a cancelled request leaves a process half way: that one is killed, too
                if is_reusable and process.child.is_alive:
                    self._idle.append(process)
                else:
                    await process.child.kill()

    async def _take(self, limits: Limits) -> RewardProcess:
        for process in [idle for idle in self._idle if not idle.child.is_alive]:
            self._idle.remove(process)
            await process.child.kill()
        for process in reversed(self._idle):
            if process.limits == limits:
                self._idle.remove(process)
                return process
        while len(self._idle) >= self._max_idle:
            await self._idle.pop(0).child.kill()
        return await RewardProcess.start(limits)

    async def close(self) -> None:
        """Kill idle processes; those at work are killed with the tasks that wait for them."""
        while self._idle:
            await self._idle.pop().child.kill()
