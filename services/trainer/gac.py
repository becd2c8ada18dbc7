"""GAC, gradient alignment control (arXiv 2603.01501): the paper's idea, our own form and thresholds.

Under asynchrony consecutive policy gradients stay aligned, and that runs away. With g the reduced, unclipped gradient,
h the one before and c = <g, h> / (|g| |h|):

    c <= c_low            use g
    c_low < c <= c_high   g' = g - gamma h, gamma such that cos(g', h) = c_low exactly
                          (full removal: gamma = <g, h> / |h|^2, cos(g', h) = 0)
    c > c_high            skip the step

One-sided: negative cosines stay. First step, zero or non-finite norm: no action, and the history starts anew.
Only three scalars are reduced over shards: <g, h>, |g|^2, |h|^2.

gamma: write g = a u + b v with u = h / |h|, v orthogonal, a = |g| c, b = |g| sqrt(1 - c^2). Then g' = a' u + b v with
a' / sqrt(a'^2 + b^2) = c_low, so a' = b c_low / sqrt(1 - c_low^2) and gamma = (a - a') / |h|.
"""

import math
from dataclasses import dataclass
from enum import StrEnum


class GacAction(StrEnum):
    NONE = "none"
    KEEP = "keep"
    PROJECT = "project"
    SKIP = "skip"


@dataclass(frozen=True)
class GacDecision:
    action: GacAction
    cosine: float | None  # None: there was no usable history
    gamma: float = 0.0  # g' = g - gamma h


def decide(
    dot: float, norm_g: float, norm_h: float, c_low: float, c_high: float, is_full_removal: bool = False
) -> GacDecision:
    """Decide what to do from <g, h>, |g| and |h|."""
    if not all(map(math.isfinite, (dot, norm_g, norm_h))) or norm_g == 0.0 or norm_h == 0.0:
        return GacDecision(GacAction.NONE, None)
    cosine = max(-1.0, min(1.0, dot / (norm_g * norm_h)))
    if cosine <= c_low:
        return GacDecision(GacAction.KEEP, cosine)
    if cosine > c_high:
        return GacDecision(GacAction.SKIP, cosine)
    along = norm_g * cosine
    across = norm_g * math.sqrt(1.0 - cosine * cosine)
    wanted = 0.0 if is_full_removal else across * c_low / math.sqrt(1.0 - c_low * c_low)
    return GacDecision(GacAction.PROJECT, cosine, (along - wanted) / norm_h)
