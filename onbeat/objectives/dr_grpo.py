"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783), section 3.2.

    A_i = r_i - mean(r)

The advantage is only centred: dividing by the standard deviation favours prompts that are almost always or almost never
solved. The sum of token losses is divided by a constant (`normalization = "constant"`: responses times
`max_response_tokens`), since dividing by each response's own length favours long wrong answers.
"""

from typing import Literal

from onbeat.objectives.base import Normalization, Tensor
from onbeat.objectives.grpo import GrpoObjective


class DrGrpoObjective(GrpoObjective):
    """arXiv 2503.20783: no division by the standard deviation, constant normaliser."""

    type: Literal["dr_grpo"]  # type: ignore[assignment]
    normalization: Normalization = "constant"

    def advantages(self, rewards: Tensor) -> Tensor:
        return rewards - rewards.mean()
