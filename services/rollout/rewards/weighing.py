"""The weighted sum of several rewards, with each of them as a part."""

import math
from collections.abc import Sequence

from onbeat.streams.codec import MAX_REWARD
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, Score


def weigh(requests: Sequence[RewardRequest], scores: Sequence[Sequence[Score]]) -> list[Score]:
    """Return one score per response from those of each reward, [R][G]. Raises RewardRefused for a sum out of bounds.

    The part of a reward is its own value, without the weight; what it has as parts is `PART.NAME`.
    """
    return [weigh_one(requests, of_response, index) for index, of_response in enumerate(zip(*scores, strict=True))]


def weigh_one(requests: Sequence[RewardRequest], scores: Sequence[Score], index: int) -> Score:
    parts: dict[str, float] = {}
    for request, score in zip(requests, scores, strict=True):
        parts |= {f"{request.part}.{name}" if request.part else name: value for name, value in score.parts.items()}
        parts |= {request.part: score.reward} if request.part else {}
    total = math.fsum(request.weight * score.reward for request, score in zip(requests, scores, strict=True))
    if abs(total) > MAX_REWARD:
        message = f"the weighted sum is {total:g}, not a number from -{MAX_REWARD} to {MAX_REWARD}; lower reward.weight"
        raise RewardRefused("invalid", message, index)
    return Score(total, parts)
