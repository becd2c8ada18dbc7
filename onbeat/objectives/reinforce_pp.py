"""REINFORCE++ (arXiv 2501.03262) in its group-baseline form: centred in the group, scaled by the whole iteration.

    A_i = (r_i - mean of its group) / (std over all centred rewards of the iteration + eps)

Every response counts once in the scale, however long it is; OpenRLHF and verl whiten over tokens, where longer ones
count more.

The scale is a statistic of the batch: it is known only when every group is in. So this objective waits for all groups
(`schedule.mode = "sync"`) and is refused in `periodic`. The token loss is GRPO's.
"""

from typing import ClassVar, Literal

from pydantic import model_validator

from onbeat.objectives.base import Tensor
from onbeat.objectives.grpo import GrpoObjective

EPS = 1e-8


class ReinforcePpObjective(GrpoObjective):
    """arXiv 2501.03262: scaled by the whole iteration, therefore not in `periodic`."""

    type: Literal["reinforce_pp"]  # type: ignore[assignment]

    modes: ClassVar[tuple[str, ...]] = ("sync", "bounded")
    needs_whole_iteration: ClassVar[bool] = True

    @model_validator(mode="after")
    def check_kl_placement(self) -> "ReinforcePpObjective":
        if self.kl.placement == "reward":
            raise ValueError(
                "objective.kl.placement: reinforce_pp scales by rewards known before the pass; use placement = 'loss'"
            )
        return self

    def iteration_scale(self, rewards_by_group: list[Tensor]) -> float:
        """Return the standard deviation of the centred rewards."""
        import torch

        centred = torch.cat([rewards - rewards.mean() for rewards in rewards_by_group])
        return float(centred.square().mean().sqrt().item()) + EPS

    def advantages(self, rewards: Tensor) -> Tensor:
        """Compute the advantages before they are scaled."""
        return rewards - rewards.mean()
