"""The input and the result of an environment."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from onbeat.environments.session import Message, Session


@dataclass(frozen=True)
class Task:
    """One prompt of the job's data, the same for all episodes of a group."""

    messages: list[Message]  # the prompt, as a conversation
    question: str
    answer: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)  # the other fields of the data's row
    origin: dict[str, Any] = field(default_factory=dict)  # origin of procedural data: the item's parameters
    seed: int = 0  # the same for all episodes of a group: what an environment draws at random should come from it


@dataclass(frozen=True)
class Outcome:
    """The end of an episode. Numbers are finite, from -1000000 to 1000000."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)  # shown, logged, never trained
    turn_rewards: dict[str, float] = field(default_factory=dict)  # rewards by the id of a call's answer; shown only


class Environment(Protocol):
    """A program that plays one episode. Several episodes run at the same time on one instance."""

    async def run(self, task: Task, policy: Session) -> Outcome:
        """Play an episode and return its outcome. What it raises is a failure of the episode, never a reward."""
