"""DAPO (arXiv 2503.14476): GRPO that clips higher, eq. 10, and averages over tokens, eq. 12.

Its dynamic sampling, which replaces groups whose rewards are equal, is `rollout.max_prompts_per_iteration`.
"""

from typing import Literal

from pydantic import Field

from onbeat.contracts.section import Float
from onbeat.objectives.grpo import GrpoObjective


class DapoObjective(GrpoObjective):
    """arXiv 2503.14476: clip-higher and token mean; dynamic sampling is `rollout.max_prompts_per_iteration`."""

    type: Literal["dapo"]  # type: ignore[assignment]
    clip_high: Float = Field(0.28, gt=0, description="importance ratios above 1 + clip_high are clipped")
