"""The rewards of long responses: what `rollout.truncated` makes of one that was cut, and the penalty before the limit.

With f the probability that the policy ends its response, and q and r the mean rewards of responses that ended and that
were cut, the gradient pushes f by

    score   q - r
    zero    q - truncated_reward
    mask    (1 - f) (q - r): cut responses are compared with, and not trained (`services/trainer/batch.py`)

`zero` is stronger than `score` only where cut responses get more than `truncated_reward`.

The penalty is DAPO's soft punishment (arXiv 2503.14476, eq. 13). With n tokens of at most L the reward loses
overlong_penalty * max(0, n - (L - overlong_cache)) / overlong_cache; a response that was cut loses all of the penalty.
An episode has the limit in each of its turns, so no one length, and no penalty.
"""

from onbeat.config.rollout import OVERLONG, RolloutConfig
from onbeat.streams.codec import Response, RolloutGroup, is_truncated


def reward_truncated(group: RolloutGroup, limits: RolloutConfig) -> None:
    """Set the rewards of the group's truncated and long responses by the job's rules. Held-out groups are scored as
    they are, and parts keep what their reward gave."""
    if group.is_evaluation:
        return
    for response in group.responses:
        if limits.truncated == "zero" and is_truncated(response):
            response.reward = limits.truncated_reward
            response.has_no_reward = False
        if limits.overlong_cache is not None and not response.turns and not response.has_no_reward:
            excess = excess_of(response, limits.max_response_tokens, limits.overlong_cache)
            response.reward -= limits.overlong_penalty * excess
            response.reward_parts[OVERLONG] = 0.0 - excess  # no -0.0


def excess_of(response: Response, max_tokens: int, cache: int) -> float:
    """Return how far the response went into the last `cache` tokens: from 0 to 1, and 1 if it was cut.

    >>> [excess_of(Response(token_ids=range(n)), max_tokens=10, cache=4) for n in (6, 7, 10)]
    [0.0, 0.25, 1.0]
    """
    num_over = max(0, len(response.token_ids) - (max_tokens - cache))
    return 1.0 if is_truncated(response) else num_over / cache
