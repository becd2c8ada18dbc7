"""DAPO (arXiv 2503.14476): GRPO that clips higher, eq. 10, and averages over tokens, eq. 12.

Its dynamic sampling replaces groups whose rewards are equal. Here they stay: the groups of an iteration are fixed.
"""

from typing import Literal

from pydantic import Field

from onbeat.objectives.grpo import GrpoObjective
from onbeat.section import Float


class DapoObjective(GrpoObjective):
    """arXiv 2503.14476: clip-higher and token mean; its dynamic sampling would change the iteration's fixed set."""

    type: Literal["dapo"]  # type: ignore[assignment]
    clip_high: Float = Field(0.28, gt=0, description="importance ratios above 1 + clip_high are clipped")
