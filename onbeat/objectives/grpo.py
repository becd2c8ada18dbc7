"""GRPO: advantages within the group and the clipped surrogate of DeepSeekMath (arXiv 2402.03300), 4.1.2 and eq. 3.

    A_i = (r_i - mean(r)) / (std(r) + eps),             r: the rewards of a group, std: the sample standard deviation
    L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),        rho = exp(trainer_logprobs - old_logprobs)

With `advantages_from = "parts"`, A_i is GDPO's (base/gdpo.py).

With one optimizer step per iteration the old policy *is* the policy: old_logprobs = trainer_logprobs.detach(), rho = 1,
and the gradient is that of -A * trainer_logprobs.
"""

from typing import Literal

from pydantic import Field, model_validator

from onbeat.contracts.section import Float
from onbeat.objectives.base import LossInputs, PolicyObjective, Tensor, TokenLoss
from onbeat.objectives.base.gdpo import AdvantagesFrom, add_parts, scale_of

EPS = 1e-4


class GrpoObjective(PolicyObjective):
    """DeepSeekMath (arXiv 2402.03300)."""

    type: Literal["grpo"] = "grpo"
    clip_low: Float = Field(0.2, gt=0, lt=1, description="importance ratios below 1 - clip_low are clipped")
    clip_high: Float = Field(0.2, gt=0, description="importance ratios above 1 + clip_high are clipped")
    advantages_from: AdvantagesFrom = Field(
        "reward",
        description="normalised in the group: the reward; or each of several rewards by itself, which are then added "
        "with their weights (GDPO, arXiv 2601.05242). scaled_parts: and divided by their size in the iteration, in "
        "`sync` only. Only of grpo, dapo, gspo and cispo",
    )

    @model_validator(mode="after")
    def check_parts(self) -> "GrpoObjective":
        if self.advantages_from != "reward" and type(self).advantages is not GrpoObjective.advantages:
            raise ValueError(
                f"objective.advantages_from: {self.type} has advantages of its own, not from {self.advantages_from}; "
                "use 'reward', or one of grpo, dapo, gspo and cispo"
            )
        if self.advantages_from != "reward" and self.kl.placement == "reward":
            raise ValueError(
                "objective.kl.placement: a penalty in the reward is none of its parts; use placement = 'loss'"
            )
        return self

    @property
    def waits_for_iteration(self) -> bool:
        return self.needs_whole_iteration or self.advantages_from == "scaled_parts"

    def compared(self, rewards: Tensor, parts: Tensor, weights: Tensor) -> Tensor:
        return rewards if self.advantages_from == "reward" else add_parts(rewards, parts, weights)

    def iteration_scale(self, rewards_by_group: list[Tensor]) -> float:
        return scale_of(rewards_by_group) if self.advantages_from == "scaled_parts" else 1.0

    def advantages(self, rewards: Tensor) -> Tensor:
        return (rewards - rewards.mean()) / (rewards.std() + EPS) if self.advantages_from == "reward" else rewards

    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        return self.clipped_surrogate(inputs.importance_ratio, inputs.advantages)

    def clipped_surrogate(self, ratio: Tensor, advantages: Tensor) -> TokenLoss:
        """Return the loss [N] for a ratio [N] and advantages [N], and whether the clip cut the token's gradient off."""
        surrogate = ratio * advantages
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high) * advantages
        return -surrogate.minimum(clipped), clipped < surrogate
