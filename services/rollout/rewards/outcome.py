"""The outcomes of scoring a group: a score, a failure of the infrastructure, or a refusal by the reward itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from onbeat.streams.codec import MAX_REWARD
from services.rollout.children.limits import MAX_MESSAGE

Number = Annotated[float, Field(strict=True, ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)]  # reward or part


UNREACHABLE = "unreachable"  # the kind of a call that did not reach its service, or found it busy


@dataclass(frozen=True)
class RewardRequest:
    """The responses of one group and how one reward scores them."""

    name: str
    options: dict[str, Any]
    context: dict[str, Any]
    responses: list[str]
    timeout_s: float  # hard limit for one response
    memory_limit_mb: int  # hard limit of the process, address space
    max_attempts: int  # tries per response
    weight: float = 1.0  # weight in the sum of several rewards
    part: str = ""  # name of its part there; '' of the only reward
    seed: int = 0  # seed of the group, which is drawn from that of the job


@dataclass(frozen=True)
class Score:
    reward: float | None  # None: no opinion
    parts: dict[str, float]


class RewardError(Exception):
    """A response has no score. `kind` names the reason in metrics and messages; how it is handled follows from the type
    alone.

    `index`: of the response; None if the whole group failed. `retry_after_s`: a retry before that is useless; infinite
    when it would bring the same answer.
    """

    def __init__(self, kind: str, message: str, index: int | None = None, *, retry_after_s: float = 0.0) -> None:
        where = "" if index is None else f"response {index}: "
        super().__init__(f"{where}{kind}: {message[:MAX_MESSAGE]}")
        self.kind, self.index, self.retry_after_s = kind, index, retry_after_s


class RewardRefused(RewardError):
    """The reward itself refused: it raised, returned nonsense, cannot be loaded. Other rollouts would get the same."""


class RewardUnavailable(RewardError):
    """The reward gave no answer: it crashed, was killed, ran out of time or memory, or was not reachable. This says
    nothing about the group."""


class ServiceMissing(RewardUnavailable):
    """The service is missing in this rollout's settings."""


def weigh(requests: Sequence[RewardRequest], scores: Sequence[Sequence[Score]]) -> list[Score]:
    """Return one score per response from those of each reward, [R][G]. Raises RewardRefused for a sum out of bounds.

    The part of a reward is its own value, without the weight; what it has as parts is `PART.NAME`. The sum is over the
    rewards with an opinion, and None if there are none.
    """
    weighed = []
    for index, of_response in enumerate(zip(*scores, strict=True)):
        parts: dict[str, float] = {}
        for request, score in zip(requests, of_response, strict=True):
            prefix = f"{request.part}." if request.part else ""
            parts |= {f"{prefix}{name}": value for name, value in score.parts.items()}
            parts |= {request.part: score.reward} if request.part and score.reward is not None else {}
        pairs = zip(requests, of_response, strict=True)
        weighted = [request.weight * score.reward for request, score in pairs if score.reward is not None]
        total = math.fsum(weighted)
        if abs(total) > MAX_REWARD:
            message = f"the weighted sum is {total:g}, not a number from -{MAX_REWARD} to {MAX_REWARD}"
            raise RewardRefused("invalid", f"{message}; lower reward.weight", index)
        weighed.append(Score(total if weighted else None, parts))
    return weighed
