"""Responses without a reward, because no reward of the job had an opinion on them: NaN in the rewards [G] of a group.

Means, deviations and leave-one-out baselines are over the others, as if these had never been sampled:

    rewards      1   NaN   0   NaN   1        ->    f(1, 0, 1) = a, b, c
    advantages   a    0    b    0    c
"""

from onbeat.objectives.base.inputs import Tensor


def has_reward(rewards: Tensor) -> Tensor:
    """Return [G] bool for the rewards [G] of a group: which responses have one."""
    return ~rewards.isnan()


def members_with_reward(rewards: Tensor) -> tuple[int, ...]:
    """Return the responses that have a reward, ascending; all if none has, as a pass needs responses."""
    members = tuple(has_reward(rewards).nonzero().flatten().tolist())
    return members or tuple(range(len(rewards)))


def with_zeros(values: Tensor, is_rewarded: Tensor) -> Tensor:
    """Return [G] with the values [M] of the M responses that have a reward, and exact zeros for the others."""
    spread = values.new_zeros(len(is_rewarded))
    spread[is_rewarded] = values
    return spread
