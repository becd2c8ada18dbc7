"""AdamW on float32 master weights beside parameters in the compute dtype.

    parameters (bf16) --backward--> gradient (bf16), added to the master's (float32) after each micro-batch
    barrier: rescale, clip, AdamW on the masters, masters -> parameters

So the weights that compute, the weights that are published and the weights that rollouts sample with are the same bits,
and small updates are not lost in bf16.
"""

from typing import Any

import torch

from onbeat.config import OptimizerConfig
from onbeat.errors import JobFailed


class MasterAdamW:
    def __init__(self, model: torch.nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(self._accumulate_into(self.masters[name]))
        self._adamw = torch.optim.AdamW(
            list(self.masters.values()),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.num_steps = 0

    @staticmethod
    def _accumulate_into(master: torch.Tensor) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return hook

    def rescale(self, denominator: float) -> dict[str, torch.Tensor]:
        """Divide the accumulated gradient, once. Returns it by name, [shape of the parameter] float32.

        A parameter without gradient gets zeros: momentum moves on in an iteration without signal.
        """
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        gradients = {name: master.grad for name, master in self.masters.items()}
        torch._foreach_mul_(list(gradients.values()), 1.0 / denominator)
        return gradients

    def clip(self) -> float:
        """Clip the global norm; returns the norm before clipping.

        Raises JobFailed when it is not finite: such a gradient never reaches the weights.
        """
        gradients = [master.grad for master in self.masters.values()]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not torch.isfinite(norm):
            raise JobFailed(f"the accumulated gradient is not finite (norm {norm.item()}); no step was taken")
        torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.config.max_grad_norm, norm)
        return norm.item()

    @torch.no_grad()
    def step(self) -> float:
        """One AdamW step; parameters become the rounded masters. Returns the learning rate used."""
        self.num_steps += 1
        warmup = self.config.num_warmup_iterations
        learning_rate = self.config.learning_rate * min(1.0, self.num_steps / (warmup + 1))
        self._adamw.param_groups[0]["lr"] = learning_rate
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.write_parameters()
        return learning_rate

    @torch.no_grad()
    def write_parameters(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])

    def drop_gradients(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Masters and both moments by name, for a checkpoint; no copies."""
        tensors = {f"master.{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            state = self._adamw.state.get(master, {})
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in state:
                    tensors[f"{moment}.{name}"] = state[moment]
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor], num_steps: int) -> None:
        """Raises ValueError naming the first tensor that is missing or of another shape."""
        for name, master in self.masters.items():
            stored = tensors.get(f"master.{name}")
            if stored is None or stored.shape != master.shape:
                found = "nothing" if stored is None else f"shape {tuple(stored.shape)}"
                raise ValueError(f"the checkpoint is of another model: {name} needs {tuple(master.shape)}, has {found}")
            master.copy_(stored)
            if num_steps > 0:
                self._adamw.state[master] = {
                    "step": torch.tensor(float(num_steps)),
                    "exp_avg": tensors[f"exp_avg.{name}"].to(master.device, copy=True),
                    "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].to(master.device, copy=True),
                }
        self.num_steps = num_steps
        self.write_parameters()
