"""AdamW on float32 master weights, whatever dtype the model computes in.

    bfloat16           parameters --backward--> gradient (bf16), added to the master's (float32) after each micro-batch;
                       those of embedding and head are added in parts (`kept_gradient`)
    float32, FSDP2     the parameters are float32 and are the masters themselves

DDP sums the masters' gradients over ranks at the barrier; FSDP sums them on the way.

    barrier: rescale, clip, AdamW on the masters, masters -> parameters

Rescaling and clipping only change a factor. A bucket's gradients are multiplied by it just before its step, while they
are in the cache, so that a step reads all gradients twice: for their norm, and for AdamW.

So the trainer's weights, the published weights and the weights that rollouts sample with are the same bits, and small
updates are not lost in bf16. Only parameters that require a gradient take part.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from onbeat.config import OptimizerConfig
from onbeat.contracts.errors import JobFailed
from services.trainer.device import has_fused_adamw
from services.trainer.model.lean_layers import MASTER
from services.trainer.model.rounding import spread_masters
from services.trainer.world import buckets

MASTER_BITS = 32
MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET_BYTES = 32 << 20  # bytes of masters stepped together
NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stepped together, so that they can be published while the next ones are stepped."""

    names: list[str]
    adamw: torch.optim.AdamW


class MasterAdamW:
    """The optimizer. After gradients have added up, call `rescale`, `clip` and `step` once each, in this order; or, in
    place of `step`, `begin_step`, and then `step_bucket` for each of the `buckets`."""

    def __init__(
        self,
        model: torch.nn.Module,
        config: OptimizerConfig,
        decay_ends: Sequence[int] = (0,),
        num_updates_per_iteration: int = 1,
    ) -> None:
        """Create the masters. `decay_ends`: steps to which the learning rate decays, ascending; a job that was given
        more iterations has several."""
        self.config, self._decay_ends = config, decay_ends
        self._num_warmup_steps = config.num_warmup_iterations * num_updates_per_iteration
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: self._master(name, p) for name, p in self.parameters.items()}
        names, runs = iter(self.masters), buckets(list(self.masters.values()), BUCKET_BYTES)
        self.buckets = [self._bucket([next(names) for _ in run]) for run in runs]
        self.num_steps = 0
        self._factor = self._factor_of_step = 1.0  # the first: what the gradients are still to be multiplied by

    def _bucket(self, names: list[str]) -> Bucket:
        masters, config = [self.masters[name] for name in names], self.config
        adamw = torch.optim.AdamW(
            masters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=has_fused_adamw(masters[0].device),
        )
        return Bucket(names, adamw)

    def _master(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """Return the float32 tensor that AdamW moves for this parameter and that accumulates its gradients."""
        if torch.finfo(parameter.dtype).bits >= MASTER_BITS:
            return parameter
        master = spread_masters(name, parameter.detach())
        setattr(parameter, MASTER, master)

        def accumulate(parameter: Any) -> None:
            if parameter.grad is None:  # it was added by what made it
                return
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return master

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the accumulated sums by name, [shape of the parameter] float32, to be summed over replicas in place.

        A parameter without gradient gets zeros: every replica has the same tensors to add, and momentum continues in an
        iteration without signal. What `rescale` and `clip` have decided is done to them first.
        """
        gradients = self._sums()
        multiply(list(gradients.values()), self._factor)
        self._factor = 1.0
        return gradients

    def _sums(self) -> dict[str, torch.Tensor]:
        for master in self.masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def rescale(self, denominator: float) -> None:
        """Divide the accumulated gradient, once."""
        self._factor /= denominator

    def clip(self) -> float:
        """Clip the global norm; returns the norm before clipping, over all ranks when sharded.

        Raises JobFailed when it is not finite: such a gradient never reaches the weights.
        """
        norm = torch.nn.utils.get_total_norm(list(self._sums().values()))
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm) * self._factor
        if not torch.isfinite(norm):
            raise JobFailed(f"the accumulated gradient is not finite (norm {norm.item()}); no step was taken")
        self._factor *= torch.clamp(self.config.max_grad_norm / (norm + NORM_EPS), max=1.0).item()
        return norm.item()

    def begin_step(self, place: int | None = None, fixed_rate: float | None = None) -> float:
        """Count a step, and return the learning rate that its buckets take.

        `place`: of the step in the job's schedule, from 1, if it is not the number of steps taken: steps that GAC
        skipped have a place, and those of the job that a fork starts from may have been fewer or more. `fixed_rate`:
        the learning rate of a step outside of the schedule.
        """
        self.num_steps += 1
        self._factor_of_step, self._factor = self._factor, 1.0
        place = self.num_steps if place is None else place
        end = next((end for end in self._decay_ends if place <= end), self._decay_ends[-1])
        learning_rate = scheduled_learning_rate(self.config, place, end, self._num_warmup_steps)
        learning_rate = learning_rate if fixed_rate is None else fixed_rate
        for bucket in self.buckets:
            bucket.adamw.param_groups[0]["lr"] = learning_rate
        return learning_rate

    def step_bucket(self, bucket: Bucket) -> None:
        """Take the AdamW step of a bucket: its parameters become the rounded masters."""
        multiply([self.masters[name].grad for name in bucket.names], self._factor_of_step)
        bucket.adamw.step()
        bucket.adamw.zero_grad(set_to_none=True)
        self.write_parameters(bucket.names)

    def step(self) -> None:
        """Take a whole AdamW step."""
        self.begin_step()
        for bucket in self.buckets:
            self.step_bucket(bucket)

    @torch.no_grad()
    def write_parameters(self, names: Iterable[str]) -> None:
        for name in names:
            if self.parameters[name] is not self.masters[name]:
                self.parameters[name].copy_(self.masters[name])

    def drop_gradients(self) -> None:
        self._factor = 1.0
        for bucket in self.buckets:
            bucket.adamw.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return the masters and both moments by name, for a checkpoint; no copies."""
        tensors = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for bucket in self.buckets:
            for name in bucket.names:
                state = bucket.adamw.state.get(self.masters[name], {})
                tensors |= {f"{moment}.{name}": state[moment] for moment in MOMENTS if moment in state}
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor], num_steps: int) -> None:
        """Restore a checkpoint's tensors. Raises ValueError naming the first that is missing or of another shape."""
        for bucket in self.buckets:
            for name in bucket.names:
                master = self.masters[name]
                master.copy_(state_tensor(tensors, f"master.{name}", master))
                if num_steps > 0:
                    moments = {moment: state_tensor(tensors, f"{moment}.{name}", master) for moment in MOMENTS}
                    step = torch.tensor(float(num_steps), device=master.device)
                    copies = {moment: tensor.to(master.device, copy=True) for moment, tensor in moments.items()}
                    bucket.adamw.state[master] = {"step": step, **copies}
        self.num_steps = num_steps
        self.write_parameters(self.masters)


@torch.no_grad()
def multiply(gradients: list[torch.Tensor | None], factor: float) -> None:
    """Multiply gradients by a factor in place. Parameters that no pass has reached have none."""
    present = [gradient for gradient in gradients if gradient is not None]
    if factor != 1.0 and present:
        torch._foreach_mul_(present, factor)


def scheduled_learning_rate(config: OptimizerConfig, step: int, end: int, warmup: int) -> float:
    """Return the learning rate of a step, counted from 1: `warmup` linear steps, then the decay to 0 after step `end`.

    A job of 10 steps, learning rate 1, 2 steps of warm-up: 1/3, 2/3, then with linear decay 1, 7/8, 6/8, ... 1/8.
    """
    if step <= warmup:
        return config.learning_rate * (step / (warmup + 1))
    done = (step - 1 - warmup) / max(1, end - warmup)  # share of the steps after the warm-up, below 1
    match config.decay:
        case "none":
            return config.learning_rate
        case "linear":
            return config.learning_rate * (1.0 - done)
        case "cosine":
            return config.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


def state_tensor(tensors: dict[str, torch.Tensor], key: str, master: torch.Tensor) -> torch.Tensor:
    stored = tensors.get(key)
    if stored is None or stored.shape != master.shape:
        stored_shape = "nothing" if stored is None else f"shape {tuple(stored.shape)}"
        raise ValueError(f"the checkpoint is of another model: {key} needs {tuple(master.shape)}, has {stored_shape}")
    return stored
