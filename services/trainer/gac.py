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

import torch
from torch.distributed.tensor import DTensor

from onbeat.config import GacConfig
from services.trainer.world import ALONE, World

Gradients = dict[str, torch.Tensor]


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


class GradientControl:
    """The control that acts between rescale and clip, on the fully reduced gradient. Checkpoints include its history.

    Sharded gradients (DTensors) are projected shard by shard; only three scalars are summed over the world's ranks.
    """

    def __init__(self, config: GacConfig, world: World = ALONE) -> None:
        self._config, self._world = config, world
        self._history: Gradients = {}

    @property
    def is_on(self) -> bool:
        return self._config.mode != "off"

    @torch.no_grad()
    def apply(self, gradients: Gradients) -> GacDecision:
        """Change `gradients` in place as decided; on SKIP the caller omits the step. Mode `metric` changes nothing."""
        assert self.is_on
        decision = GacDecision(GacAction.NONE, None)
        if self._history.keys() == gradients.keys():
            dot, square_g, square_h = inner_products(gradients, self._history, self._world)
            decision = decide(dot, square_g**0.5, square_h**0.5, self._config)
        if self._config.mode != "control" and decision.action is not GacAction.NONE:
            decision = GacDecision(GacAction.KEEP, decision.cosine)
        is_projected = decision.action is GacAction.PROJECT
        for name, gradient in gradients.items():
            if is_projected:  # one tensor is copied at a time
                last = self._history[name]
                kept = gradient.clone() if self._config.history == "raw" else gradient
                gradient.sub_(last, alpha=decision.gamma)
                last.copy_(kept)
            elif name in self._history:
                self._history[name].copy_(gradient)
            else:
                self._history[name] = gradient.clone()
        return decision

    def state_tensors(self) -> Gradients:
        return {f"gac.{name}": tensor for name, tensor in self._history.items()}

    def load_state_tensors(self, tensors: Gradients) -> None:
        if not self.is_on:  # a fork's; the job that it starts from may have a history
            return
        self._history = {
            name.removeprefix("gac."): tensor.to(self._world.device, copy=True)
            for name, tensor in tensors.items()
            if name.startswith("gac.")
        }


def decide(dot: float, norm_g: float, norm_h: float, config: GacConfig) -> GacDecision:
    """Decide what to do from <g, h>, |g| and |h|."""
    if not all(map(math.isfinite, (dot, norm_g, norm_h))) or norm_g == 0.0 or norm_h == 0.0:
        return GacDecision(GacAction.NONE, None)
    c_low, cosine = config.c_low, max(-1.0, min(1.0, dot / (norm_g * norm_h)))
    if cosine <= c_low:
        return GacDecision(GacAction.KEEP, cosine)
    if cosine > config.c_high:
        return GacDecision(GacAction.SKIP, cosine)
    along = norm_g * cosine
    across = norm_g * math.sqrt(1.0 - cosine * cosine)
    wanted = 0.0 if config.is_full_removal else across * c_low / math.sqrt(1.0 - c_low * c_low)
    return GacDecision(GacAction.PROJECT, cosine, (along - wanted) / norm_h)


def inner_products(g: Gradients, h: Gradients, world: World) -> list[float]:
    """Return <g, h>, |g|^2, |h|^2 over all parameters and ranks, added up in float64.

    A rank counts its own rows of sharded parameters. Replicated parameters are the same on every rank and are counted
    by rank 0 alone, so that each element counts once.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for name, gradient in g.items():
        if isinstance(gradient, DTensor) or world.is_main:
            ours, before = local_part(gradient), local_part(h[name])
            norms = [torch.linalg.vector_norm(part) for part in (ours, before)]
            dot, *norms = torch.stack([torch.dot(ours, before), *norms]).cpu().double()  # an NPU has no float64
            sums += torch.stack([dot, *(norm**2 for norm in norms)])
    return world.sum_scalars(sums.tolist())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements on this rank, flat."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).flatten()
