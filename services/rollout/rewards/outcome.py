"""What scoring a group comes to: a score, a failure of the infrastructure, or a no from the reward itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import Field

from onbeat.streams.codec import MAX_REWARD
from services.rollout.rewards.limits import MAX_MESSAGE

Number = Annotated[float, Field(strict=True, ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]  # reward or part


UNREACHABLE = "unreachable"  # the kind of a call that did not reach its service, or found it busy


@dataclass(frozen=True)
class RewardRequest:
    """The responses of one group and how to score them."""

    name: str
    options: dict[str, Any]
    context: dict[str, Any]
    responses: list[str]
    timeout_s: float  # hard limit for one response
    memory_limit_mb: int  # hard limit of the process, address space
    max_attempts: int  # tries per response


@dataclass(frozen=True)
class Score:
    reward: float
    parts: dict[str, float]


class RewardError(Exception):
    """No score. `kind` names the reason in metrics and messages; what is done about it follows from the type alone.

    `index`: of the response that has none; None if it is the whole group's failure. `is_final`: asking again would
    bring the same answer.
    """

    def __init__(self, kind: str, message: str, index: int | None = None, *, is_final: bool = False) -> None:
        where = "" if index is None else f"response {index}: "
        super().__init__(f"{where}{kind}: {message[:MAX_MESSAGE]}")
        self.kind, self.index, self.is_final = kind, index, is_final


class RewardRefused(RewardError):
    """The reward itself says no: it raised, returned nonsense, cannot be loaded. Other rollouts would hear the same."""


class RewardUnavailable(RewardError):
    """The reward did not get to say anything: crashed, killed, out of time or memory, not reachable. Says nothing about
    the group. `retry_after_s`: no use trying before."""

    def __init__(self, kind: str, message: str, index: int | None = None, *, retry_after_s: float = 0.0) -> None:
        super().__init__(kind, message, index)
        self.retry_after_s = retry_after_s


class ServiceMissing(RewardUnavailable):
    """This rollout was not told where the service is."""


class RewardSource(Protocol):
    """Where scores come from: a scoring process or a service."""

    async def score(
        self, request: RewardRequest, indexes: Sequence[int], scores: dict[int, Score], deadline: float
    ) -> None:
        """One try: put the scores of the responses at `indexes` into `scores`, at least one. Raises RewardError.

        `deadline`, of the event loop's clock: the caller cancels soon after it.
        """
