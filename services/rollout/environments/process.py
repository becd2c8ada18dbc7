"""One process of an environment: it plays a group at a time. What it answers is checked like untrusted input."""

import asyncio
import dataclasses
import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, TypeAdapter

from onbeat.environments import Outcome
from onbeat.types import EpisodeFailureKind as Kind
from services.rollout.children.answers import Answer, Loaded, OutOfStep, receive_answer
from services.rollout.children.limits import LOAD_S
from services.rollout.children.process import ChildDied, ChildProcess
from services.rollout.episodes.contract import EpisodeFailure, PlayRequest, PlayResult
from services.rollout.rewards.outcome import Number

GRACE_S = 10.0  # an event loop that ends no episode in this time after the limit is blocked
SPOILING = ("timeout", "memory", "load")  # after these a process may have threads that hang: it is not used again
CODE = "the environment"  # in messages


class Ended(Answer):
    step: Literal["ended"]
    episode: NonNegativeInt
    reward: Number
    parts: dict[str, Number]
    turn_rewards: dict[str, Number]


class Failed(Answer):
    step: Literal["failed"]
    episode: NonNegativeInt
    kind: Literal["load", "raised", "timeout", "invalid", "memory", "unreachable"]
    message: str


ANSWER: TypeAdapter[Loaded | Ended | Failed] = TypeAdapter(
    Annotated[Loaded | Ended | Failed, Field(discriminator="step")]
)


@dataclass(frozen=True)
class Program:
    """The one environment that a process runs for all its life, its options, and the process's memory."""

    name: str
    options_json: str
    memory_limit_mb: int

    @classmethod
    def of(cls, request: PlayRequest) -> "Program":
        return cls(request.name, json.dumps(request.options, sort_keys=True), request.memory_limit_mb)


class ProcessFailed(Exception):
    """The process plays no further: all its episodes without a result have failed in the same way."""

    def __init__(self, failure: EpisodeFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class EnvironmentProcess:
    """A process that plays the episodes of one request after another."""

    def __init__(self, child: ChildProcess, program: Program) -> None:
        self.program = program
        self._child = child
        self._num_requests = 0
        self._is_loaded = self._is_spoilt = False

    @classmethod
    async def start(cls, program: Program) -> "EnvironmentProcess":
        """Start a process. Raises ProcessFailed."""
        module, memory = "services.rollout.environments.child", str(program.memory_limit_mb)
        try:
            child = await ChildProcess.start("the environment's process", module, memory)
        except OSError as error:
            raise ProcessFailed(EpisodeFailure(Kind.CRASHED, f"no process could be started: {error}")) from error
        return cls(child, program)

    @property
    def is_reusable(self) -> bool:
        return self._child.is_alive and self._is_loaded and not self._is_spoilt

    async def play(self, request: PlayRequest, results: dict[int, PlayResult]) -> None:
        """Put the result of each episode into `results`. Raises ProcessFailed when there will be no more."""
        try:
            if not self._is_loaded:
                await self._load()
            await self._play(request, results)
        except ChildDied as error:
            raise ProcessFailed(EpisodeFailure(Kind.OUTPUT if error.is_flood else Kind.CRASHED, str(error))) from error

    async def _load(self) -> None:
        try:
            await self._child.send({"name": self.program.name, "options": json.loads(self.program.options_json)})
            answer = await self._receive(LOAD_S)
        except TimeoutError as error:
            raise ProcessFailed(EpisodeFailure(Kind.LOAD, f"it was not loaded within {LOAD_S:g} s")) from error
        if isinstance(answer, Failed):
            raise ProcessFailed(EpisodeFailure(Kind(answer.kind), answer.message))
        if not isinstance(answer, Loaded):
            raise OutOfStep(CODE)
        self._is_loaded = True

    async def _play(self, request: PlayRequest, results: dict[int, PlayResult]) -> None:
        self._num_requests += 1
        try:
            await self._child.send(as_message(request, self._num_requests))
            request.on_begin()
            loop_time = asyncio.get_running_loop().time
            deadline = loop_time() + request.timeout_s + GRACE_S
            while len(results) < len(request.access):
                answer = await self._receive(deadline - loop_time())
                if isinstance(answer, Loaded) or answer.episode in results or answer.episode >= len(request.access):
                    raise OutOfStep(CODE)
                results[answer.episode] = self._result(answer)
                request.on_end(answer.episode)
        except TimeoutError as error:
            message = (
                f"the episode took longer than {request.timeout_s:g} s and its process does not answer: code that does "
                "not await holds up all episodes of a group"
            )
            raise ProcessFailed(EpisodeFailure(Kind.TIMEOUT, message)) from error

    async def _receive(self, timeout_s: float) -> Loaded | Ended | Failed:
        return await receive_answer(self._child, ANSWER, self._num_requests, timeout_s, CODE)

    def _result(self, answer: Ended | Failed) -> PlayResult:
        if isinstance(answer, Ended):
            return Outcome(answer.reward, answer.parts, answer.turn_rewards)
        self._is_spoilt = self._is_spoilt or answer.kind in SPOILING
        return EpisodeFailure(Kind(answer.kind), answer.message)

    async def kill(self) -> None:
        await self._child.kill()


def as_message(request: PlayRequest, number: int) -> dict[str, Any]:
    task, access = dataclasses.asdict(request.task), [list(each) for each in request.access]
    return {"request": number, "task": task, "access": access, "timeout_s": request.timeout_s}
