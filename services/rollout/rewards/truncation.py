"""The reward of a truncated response, which `rollout.truncated` decides: as it was scored, or zero.

With f the probability that the policy ends its response, and q and r the mean rewards of responses that ended and that
were cut, the gradient pushes f by q - r. `zero` makes r zero, so an end pays whatever a reward finds in a text that was
cut. It is stronger than `score` only where cut responses are rewarded.
"""

from typing import Literal

from onbeat.streams.codec import Response, RolloutGroup


def reward_truncated(group: RolloutGroup, rule: Literal["score", "zero"]) -> None:
    """Set the rewards of the group's truncated responses, as the rule says. Held-out groups are scored as they are, and
    parts keep what their reward gave."""
    if rule == "score" or group.is_evaluation:
        return
    for response in group.responses:
        if is_truncated(response):
            response.reward = 0.0
            response.has_no_reward = False


def is_truncated(response: Response) -> bool:
    """Return whether the response was cut at its limit of tokens; an episode is as soon as one of its turns was."""
    return "length" in (response.finish_reason, *(turn.finish_reason for turn in response.turns))
