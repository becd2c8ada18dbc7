"""The weighted sum of several rewards, with each of them as a part."""

import math
from collections.abc import Sequence

from onbeat.streams.codec import MAX_REWARD
from services.rollout.rewards.outcome import RewardRefused, RewardRequest, Score


def weigh(requests: Sequence[RewardRequest], scores: Sequence[Sequence[Score]]) -> list[Score]:
    """Return one score per response from those of each reward, [R][G]. Raises RewardRefused for a sum out of bounds.

    The part of a reward is its own value, without the weight; what it has as parts is `PART.NAME`.
    """
    weighed = []
    for index, of_response in enumerate(zip(*scores, strict=True)):
        parts: dict[str, float] = {}
        for request, score in zip(requests, of_response, strict=True):
            prefix = f"{request.part}." if request.part else ""
            parts |= {f"{prefix}{name}": value for name, value in score.parts.items()}
            parts |= {request.part: score.reward} if request.part else {}
        total = math.fsum(request.weight * score.reward for request, score in zip(requests, of_response, strict=True))
        if abs(total) > MAX_REWARD:
            message = f"the weighted sum is {total:g}, not a number from -{MAX_REWARD} to {MAX_REWARD}"
            raise RewardRefused("invalid", f"{message}; lower reward.weight", index)
        weighed.append(Score(total, parts))
    return weighed
