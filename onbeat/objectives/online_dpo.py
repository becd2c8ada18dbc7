"""Online DPO (arXiv 2410.18252, after arXiv 2305.18290, eq. 7): preference pairs from a group by reward.

    L = -log sigmoid(beta [(log pi(w) - log ref(w)) - (log pi(l) - log ref(l))])

w and l are the group's best and worst response (first of equals); log pi sums over the response. A group whose rewards
are all equal has no pair. The loss needs no importance ratio, which is why it bears off-policy rollouts best.
"""

import math
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from onbeat.contracts.section import Float
from onbeat.objectives.base import Logprobs, Loss, Objective, Responses, Tensor
from onbeat.objectives.base.kl import kl_estimate
from onbeat.objectives.base.opinions import has_reward


class OnlineDpoObjective(Objective):
    """arXiv 2410.18252: the best and the worst response of a group as a preference pair."""

    type: Literal["online_dpo"]
    beta: Float = Field(0.1, gt=0, description="factor of the preference loss; larger stays closer to the reference")

    has_importance_ratio: ClassVar[bool] = False
    has_advantages: ClassVar[bool] = False

    @model_validator(mode="after")
    def check_terms(self) -> "OnlineDpoObjective":
        for name, has_effect in (("kl.coef", self.kl.coef > 0), ("importance", self.importance is not None)):
            if has_effect:
                raise ValueError(
                    f"objective.{name}: online_dpo has neither a KL term nor importance weights; leave it out, and use "
                    "beta to stay closer to the reference"
                )
        return self

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def needs_whole_group(self) -> bool:
        return True

    def has_signal(self, rewards: Tensor) -> bool:
        return len(rewards) > 0 and best_and_worst(rewards) is not None

    def trained_members(self, rewards: Tensor) -> tuple[int, ...]:
        """Return the pair, or any two if there is none."""
        return tuple(sorted(best_and_worst(rewards) or (0, 1)))

    def loss(self, batch: Responses, logprobs: Logprobs, scale: float = 1.0) -> Loss:
        import torch
        from torch.nn.functional import logsigmoid

        assert logprobs.ref is not None
        pairs, first = [], 0
        for rewards, members in zip(batch.group_rewards, batch.members, strict=True):
            if (pair := best_and_worst(rewards)) is not None:
                place = {member: first + index for index, member in enumerate(members.tolist())}
                pairs.append([place[member] for member in pair])
            first += len(members)
        best, worst = torch.tensor(pairs, dtype=torch.int64, device=logprobs.old.device).reshape(-1, 2).unbind(1)
        log_ratio = batch.response_sum(
            logprobs.trainer - logprobs.ref
        )  # [R]; of long sums the difference would be lost
        pair_loss = -logsigmoid(self.beta * (log_ratio[best] - log_ratio[worst]))
        kl = kl_estimate(self.kl.estimator, logprobs.trainer, logprobs.ref)
        return Loss(pair_loss.sum(), 0, len(pairs), {"kl": kl})

    def denominator(self, num_tokens: int, num_responses: int, num_pairs: int, max_response_tokens: int) -> int:
        return num_pairs


def best_and_worst(rewards: Tensor) -> tuple[int, int] | None:
    """Return the indices of the pair, or None when all rewards [G] are equal. Responses without a reward (NaN) are in
    no pair."""
    best = int(rewards.where(has_reward(rewards), -math.inf).argmax())
    worst = int(rewards.where(has_reward(rewards), math.inf).argmin())
    return (best, worst) if rewards[best] > rewards[worst] else None
