"""The contract between the runner of episodes and the processes that environments run in.

The process of an environment gets a task and one session (a URL and a key) per episode, and returns numbers or a
failure per episode. It never sees tokens.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from onbeat.config import EnvironmentConfig
from onbeat.contracts.states import EpisodeFailureKind
from onbeat.environments import Outcome, Task


class EpisodeAccess(NamedTuple):
    """The session of one episode."""

    url: str  # base URL, OpenAI-compatible: chat/completions is below it
    key: str  # bearer key of this episode


@dataclass(frozen=True)
class Program:
    """The one environment that a process runs for all its life."""

    name: str  # entry point of the group `onbeat.environments`
    options_json: str  # keyword arguments of that
    memory_limit_mb: int  # hard limit of the process, address space

    @classmethod
    def of_config(cls, environment: EnvironmentConfig) -> "Program":
        return cls(environment.name, json.dumps(environment.options), environment.memory_limit_mb)


@dataclass(frozen=True)
class PlayRequest:
    """Episodes of one task that one process plays side by side."""

    program: Program
    task: Task  # the same for all episodes
    timeout_s: float  # hard limit for each episode, from its start to its outcome
    access: Sequence[EpisodeAccess] = ()  # one per episode
    # Call it when the environment is loaded and the episodes begin: their time runs from now on.
    on_begin: Callable[[], None] = lambda: None
    # Call it with an index of `access` once that episode has its result, while others go on: its session then refuses
    # further calls. Where it is not called, sessions end with the request.
    on_end: Callable[[int], None] = lambda index: None


@dataclass(frozen=True)
class EpisodeFailure:
    """An episode that has no outcome, and why."""

    kind: EpisodeFailureKind
    message: str


PlayResult = Outcome | EpisodeFailure


class EnvironmentRunner(Protocol):
    """The processes that environments run in."""

    async def play(self, request: PlayRequest) -> list[PlayResult]:
        """Play all episodes and return their results in the order of `access`.

        An episode that fails is a result, and the others go on. Nothing is raised for what environments do. When this
        is cancelled, what still runs is ended.
        """

    def num_groups(self) -> int:
        """Return how many groups can be played at a time, those included that are being played."""

    async def close(self) -> None:
        """End all processes."""
