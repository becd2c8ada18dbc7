"""GAC on the accumulated gradient: keeps the last one, measures the cosine, projects or skips (`algorithm/gac`)."""

import torch

from onbeat.config import GacConfig
from services.trainer.algorithm.gac import GacAction, GacDecision, decide


class GradientControl:
    """Acts between the rescale and the clip, on the fully reduced gradient. Its history is part of a checkpoint."""

    def __init__(self, config: GacConfig) -> None:
        self._config = config
        self._history: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def apply(self, gradients: dict[str, torch.Tensor]) -> GacDecision:
        """Change `gradients` in place as decided; on SKIP the caller leaves out the step. Mode `metric` never acts."""
        if self._config.mode == "off":
            return GacDecision(GacAction.NONE, None)
        decision = self._decide(gradients)
        raw = {name: gradient.clone() for name, gradient in gradients.items()} if self._is_raw(decision) else None
        if self._config.mode == "control" and decision.action is GacAction.PROJECT:
            for name, gradient in gradients.items():
                gradient.sub_(self._history[name], alpha=decision.gamma)
        self._remember(raw or gradients)
        return decision

    def _decide(self, gradients: dict[str, torch.Tensor]) -> GacDecision:
        if self._history.keys() != gradients.keys():
            return GacDecision(GacAction.NONE, None)
        dot = sum(torch.dot(g.flatten(), self._history[name].flatten()).item() for name, g in gradients.items())
        norm_g = torch.nn.utils.get_total_norm(gradients.values()).item()
        norm_h = torch.nn.utils.get_total_norm(self._history.values()).item()
        config = self._config
        return decide(dot, norm_g, norm_h, config.c_low, config.c_high, config.is_full_removal)

    def _is_raw(self, decision: GacDecision) -> bool:
        acts = self._config.mode == "control" and decision.action is GacAction.PROJECT
        return acts and self._config.history == "raw"

    def _remember(self, gradients: dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            if name in self._history:
                self._history[name].copy_(gradient)
            else:
                self._history[name] = gradient.clone()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {f"gac.{name}": tensor for name, tensor in self._history.items()}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self._history = {
            name.removeprefix("gac."): tensor.clone() for name, tensor in tensors.items() if name.startswith("gac.")
        }
