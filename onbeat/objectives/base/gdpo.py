"""GDPO (arXiv 2601.05242): each part of the reward is normalised in its group by itself, and then they are added.

    a_ik = (r_ik - mean(r_k)) / (std(r_k) + eps),        r_k: part k of a group's responses, std: the sample deviation
    A_i  = sum over k of w_k a_ik                        w_k: the weight of the reward that gives the part
    A_i / (root of the mean A^2 of the iteration + eps)  only with `advantages_from = "scaled_parts"`

Of a sum of rewards, GRPO sees the total: right without form and wrong with form may be the same to it. A part that is
equal in the whole group adds exact zeros, and one without an opinion on a response adds none there. A small part gets
full size; so groups without the job's `signal` teach nothing, whatever their parts are: the trainer gives them parts
that are all 0.

The paper's code divides by the deviation around the mean, which is 0 here but for missing opinions. The text of the
paper was not available for the last step: that every response counts once in the scale is our choice.
"""

import math
from collections.abc import Iterator
from typing import Literal

from onbeat.objectives.base.inputs import Tensor
from onbeat.objectives.base.opinions import has_reward, with_zeros

PART_EPS, SCALE_EPS = 1e-4, 1e-8
AdvantagesFrom = Literal["reward", "parts", "scaled_parts"]


def add_parts(rewards: Tensor, parts: Tensor, weights: Tensor) -> Tensor:
    """Return the advantages [G] of a group from its parts [K, G] and their weights [K]. In a part, NaN is no opinion;
    among the rewards [G] it is no reward, and there the result is NaN, too."""
    import torch

    total = torch.zeros_like(rewards)
    for part, weight in zip(parts, weights, strict=True):
        values = part[has_reward(part)]
        if len(values) > 1 and bool((values != values[0]).any()):
            total = total + weight * with_zeros((values - values.mean()) / (values.std() + PART_EPS), has_reward(part))
    return total.where(has_reward(rewards), math.nan)


def scale_of(advantages_by_group: list[Tensor]) -> float:
    """Return the root of the mean square of all advantages of an iteration."""
    import torch

    return float(torch.cat(advantages_by_group).square().mean().sqrt().item()) + SCALE_EPS


def problems_of_parts(
    advantages_from: str, num_rewards: int, mode: str, truncated: str, has_penalty: bool
) -> Iterator[str]:
    """Yield what does not go together with advantages from parts: the field, what is wrong with it, and a remedy.
    `has_penalty`: long responses lose reward."""
    field = f"objective.advantages_from: {advantages_from}"
    if advantages_from == "reward":
        return
    if num_rewards < 2:
        yield (
            f"{field} needs several rewards for every prompt, whose parts it compares; write each under [[reward]], "
            "where no environment plays, or use 'reward'"
        )
    if advantages_from == "scaled_parts" and mode != "sync":
        yield (
            f"{field} needs statistics of the whole iteration and cannot run in {mode}; use 'parts', or "
            "schedule.mode = 'sync'"
        )
    if has_penalty:
        yield f"{field} compares parts, and rollout.overlong_cache lowers their sum; leave it out, or use 'reward'"
    if truncated == "zero":
        yield (
            f"{field} compares parts, and rollout.truncated = 'zero' sets their sum; use rollout.truncated = 'score', "
            "with a reward that pays an end"
        )
