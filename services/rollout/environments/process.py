"""One process of an environment: it plays a group at a time. What it answers is checked like untrusted input."""

import asyncio
import dataclasses
import functools
import json
import logging
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, TypeAdapter

from onbeat.contracts.states import EpisodeFailureKind as Kind
from onbeat.environments import Outcome
from onbeat.process.children import ChildDied, ChildProcess
from services.rollout.children.answers import Answer, Loaded, OutOfStep, receive_answer
from services.rollout.deadlines import LOAD_S
from services.rollout.episodes.contract import EpisodeFailure, PlayRequest, PlayResult, Program
from services.rollout.rewards.outcome import Number

logger = logging.getLogger(__name__)

GRACE_S = 10.0  # an event loop that ends no episode in this time after the limit is blocked
SPOILING = (Kind.TIMEOUT, Kind.MEMORY)  # after these a process may have threads that hang: it is not used again
CODE = "the environment"  # subject of messages
BLOCKED = "code that does not await holds up all episodes of a group"


class EpisodeOver(Answer):
    episode: NonNegativeInt
    has_busy_threads: bool = False  # calls in threads, of this episode or another one, have not returned


class Ended(EpisodeOver):
    step: Literal["ended"]
    reward: Number
    parts: dict[str, Number]
    turn_rewards: dict[str, Number]

    def to_result(self) -> Outcome:
        return Outcome(self.reward, self.parts, self.turn_rewards)


class Failed(EpisodeOver):
    step: Literal["failed"]
    kind: Literal["load", "raised", "timeout", "invalid", "memory", "unreachable"]
    message: str

    def to_result(self) -> EpisodeFailure:
        return EpisodeFailure(Kind(self.kind), self.message)


ANSWER: TypeAdapter[Loaded | Ended | Failed] = TypeAdapter(
    Annotated[Loaded | Ended | Failed, Field(discriminator="step")]
)


class EnvironmentProcess:
    """A process that plays the episodes of one request after another."""

    def __init__(self, child: ChildProcess, program: Program) -> None:
        self.program = program
        self.child = child
        self._num_requests = 0
        self._is_spoilt = True  # until all episodes of a request have ended well enough

    @classmethod
    async def start(cls, program: Program) -> "EnvironmentProcess":
        """Start a process. Raises OSError."""
        module, memory = "services.rollout.environments.child", str(program.memory_limit_mb)
        return cls(await ChildProcess.start("the environment's process", module, memory), program)

    @property
    def is_reusable(self) -> bool:
        return self.child.is_alive and not self._is_spoilt

    async def play(self, request: PlayRequest) -> list[PlayResult]:
        """Play all episodes. Where the process dies or does not answer, it is spoilt, and what had not ended has
        failed. It is spoilt, too, when this is cancelled, or when calls in its threads outlive the episodes."""
        results: dict[int, PlayResult] = {}
        self._is_spoilt = True
        try:
            failure = await self._play(request, results)
        except ChildDied as error:
            failure = EpisodeFailure(Kind.OUTPUT if error.is_flood else Kind.CRASHED, str(error))
        if failure is not None:
            return [results.get(episode, failure) for episode in range(len(request.access))]
        failures = [result for result in results.values() if isinstance(result, EpisodeFailure)]
        self._is_spoilt |= any(ended.kind in SPOILING for ended in failures)
        return [results[episode] for episode in sorted(results)]

    async def _play(self, request: PlayRequest, results: dict[int, PlayResult]) -> EpisodeFailure | None:
        """Fill `results`. Return the failure of those that there will not be."""
        self._num_requests += 1
        late = f"the episode took longer than {request.timeout_s:g} s and its process does not answer"
        unanswered = EpisodeFailure(Kind.TIMEOUT, f"{late}: {BLOCKED}")
        not_loaded = EpisodeFailure(Kind.LOAD, f"it was not loaded within {LOAD_S:g} s")
        is_loaded = self._num_requests > 1
        try:
            await self.child.send(as_message(request, self._num_requests), LOAD_S)
            if not is_loaded:
                answer = await self._receive(LOAD_S)
                if isinstance(answer, Failed):
                    return answer.to_result()
                if not isinstance(answer, Loaded):
                    raise OutOfStep(CODE)
                if answer.warning:
                    warn_once(request.program.name, answer.warning)
                is_loaded = True
            request.on_begin()
            loop_time = asyncio.get_running_loop().time
            deadline = loop_time() + request.timeout_s + GRACE_S
            while len(results) < len(request.access):
                answer = await self._receive(deadline - loop_time())
                if isinstance(answer, Loaded) or answer.episode in results or answer.episode >= len(request.access):
                    raise OutOfStep(CODE)
                results[answer.episode] = answer.to_result()
                self._is_spoilt = len(results) < len(request.access) or answer.has_busy_threads
                request.on_end(answer.episode)
        except TimeoutError:
            return unanswered if is_loaded else not_loaded
        return None

    async def _receive(self, timeout_s: float) -> Loaded | Ended | Failed:
        return await receive_answer(self.child, ANSWER, self._num_requests, timeout_s, CODE)


@functools.cache  # the processes of an environment say the same
def warn_once(name: str, warning: str) -> None:
    logger.warning("environment %s: %s", name, warning)


def as_message(request: PlayRequest, number: int) -> dict[str, Any]:
    program = {"name": request.program.name, "options": json.loads(request.program.options_json)}
    episodes = {"task": dataclasses.asdict(request.task), "access": request.access, "timeout_s": request.timeout_s}
    return {"request": number, **program, **episodes}
