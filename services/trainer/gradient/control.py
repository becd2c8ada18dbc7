"""GAC on the accumulated gradient: it keeps the last one, measures the cosine, projects or skips (`gac`)."""

import torch
from torch.distributed.tensor import DTensor

from onbeat.config import GacConfig
from services.trainer.gradient.gac import GacAction, GacDecision, decide
from services.trainer.world import World

Gradients = dict[str, torch.Tensor]


class GradientControl:
    """The control that acts between rescale and clip, on the fully reduced gradient. Checkpoints include its history.

    Sharded gradients (DTensors) are projected shard by shard; only three scalars are summed over the world's ranks.
    """

    def __init__(self, config: GacConfig, world: World | None = None) -> None:
        self._config, self._world = config, world or World()
        self._history: Gradients = {}

    @torch.no_grad()
    def apply(self, gradients: Gradients) -> GacDecision:
        """Change `gradients` in place as decided; on SKIP the caller omits the step. Mode `metric` changes nothing."""
        if self._config.mode == "off":
            return GacDecision(GacAction.NONE, None)
        decision = self._decide(gradients)
        if self._config.mode == "control" and decision.action is GacAction.PROJECT:
            self._project(gradients, decision.gamma)
        else:
            self._remember(gradients)
        return decision

    def _project(self, gradients: Gradients, gamma: float) -> None:
        """Subtract gamma times the last gradient, and remember this one: one tensor is copied at a time."""
        for name, gradient in gradients.items():
            last = self._history[name]
            kept = gradient.clone() if self._config.history == "raw" else gradient
            gradient.sub_(last, alpha=gamma)
            last.copy_(kept)

    def _decide(self, gradients: Gradients) -> GacDecision:
        if self._history.keys() != gradients.keys():
            return GacDecision(GacAction.NONE, None)
        dot, square_g, square_h = inner_products(gradients, self._history, self._world)
        config = self._config
        return decide(dot, square_g**0.5, square_h**0.5, config.c_low, config.c_high, config.is_full_removal)

    def _remember(self, gradients: Gradients) -> None:
        for name, gradient in gradients.items():
            if name in self._history:
                self._history[name].copy_(gradient)
            else:
                self._history[name] = gradient.clone()

    def state_tensors(self) -> Gradients:
        return {f"gac.{name}": tensor for name, tensor in self._history.items()}

    def load_state_tensors(self, tensors: Gradients) -> None:
        if self._config.mode == "off":  # a fork's; the job that it starts from may have a history
            return
        self._history = {
            name.removeprefix("gac."): tensor.to(self._world.device, copy=True)
            for name, tensor in tensors.items()
            if name.startswith("gac.")
        }


def inner_products(g: Gradients, h: Gradients, world: World) -> list[float]:
    """Return <g, h>, |g|^2, |h|^2 over all parameters and ranks, added up in float64.

    A rank counts its own rows of sharded parameters. Replicated parameters are the same on every rank and are counted
    by rank 0 alone, so that each element counts once.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for name, gradient in g.items():
        if isinstance(gradient, DTensor) or world.is_main:
            ours, before = local_part(gradient), local_part(h[name])
            norms = [torch.linalg.vector_norm(part).double() ** 2 for part in (ours, before)]
            sums += torch.stack([torch.dot(ours, before).double(), *norms]).cpu()
    return world.sum_scalars(sums.tolist())


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's elements on this rank, flat."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).flatten()
