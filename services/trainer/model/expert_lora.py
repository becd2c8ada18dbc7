"""Low-rank adapters on experts: parameters of three dimensions, one matrix for each expert. As in lora.py, the policy
computes with the merged weight, rounded once, which is what is published.

    W'[e] = W[e] + scale B[e] A[e]      W [E, out, in], A [E, r, in], B [E, out, r]; B begins at 0

Some families keep W as [E, in, out]; then the update is transposed. Families compute with their experts in their own
ways (loops, grouped products), so nothing but the parameter is replaced: while the module of the experts runs, W'
stands in the place of W. It is kept for the backward pass, because the products of the experts need it there.
"""

import functools
from typing import Any

import torch
from torch import nn

from onbeat.config import LoraConfig

FACTORS = "lora_"  # before the parameter's name: the factors in the module of the experts


class ExpertFactors(nn.Module):
    """The factors A and B of one parameter. `is_off`: its module computes with W."""

    def __init__(self, weight: torch.Tensor, config: LoraConfig, is_transposed: bool) -> None:
        """Draw A on the CPU as PEFT does, uniform within 1 / sqrt(in)."""
        super().__init__()
        num_experts, size_out, size_in = getattr(weight, "whole_shape", weight.shape)
        if is_transposed:
            size_out, size_in = size_in, size_out
        drawn_on = weight.device if weight.is_meta else torch.device("cpu")
        a = torch.empty(num_experts, config.rank, size_in, device=drawn_on).uniform_(-(size_in**-0.5), size_in**-0.5)
        b = torch.zeros(num_experts, size_out, config.rank, device=drawn_on)
        self.a, self.b = (nn.Parameter(factor.to(weight.device, weight.dtype)) for factor in (a, b))
        self.scale, self.is_transposed, self.is_off = config.scale, is_transposed, False

    def merge(self, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return W' in the layout of W, rounded once."""
        return merged_experts(weight, a, b, self.scale, self.is_transposed)


def merged_experts(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, is_transposed: bool
) -> torch.Tensor:
    if is_transposed:
        return torch.baddbmm(weight, a.mT, b.mT, alpha=scale)
    return torch.baddbmm(weight, b, a, alpha=scale)


class MergedExperts(torch.autograd.Function):
    """The function W' with gradients for A and B."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, is_transposed: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.scale, ctx.is_transposed = scale, is_transposed
        return merged_experts(weight, a, b, scale, is_transposed)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad = grad.mT if ctx.is_transposed else grad  # [E, out, in]
        return None, (b.mT @ grad) * ctx.scale, (grad @ a.mT) * ctx.scale, None, None


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds experts: transformers names such classes so in all families. Convolutions, and
    gates of recurrent layers, have parameters of three dimensions, too."""
    return type(module).__name__.endswith("Experts") and bool(expert_parameters(module))


def expert_parameters(module: nn.Module) -> list[str]:
    """Return the names of parameters of three dimensions in the module itself."""
    parameters = module.named_parameters(recurse=False)
    return [name for name, weight in parameters if len(getattr(weight, "whole_shape", weight.shape)) == 3]


def add_factors(model: nn.Module, names: list[str], config: LoraConfig) -> None:
    """Put adapters on these parameters of experts, in place."""
    for name in names:
        module_name, _, own_name = name.rpartition(".")
        experts: Any = model.get_submodule(module_name)
        is_transposed = bool(getattr(experts, "is_transposed", False))
        experts.add_module(FACTORS + own_name, ExpertFactors(experts._parameters[own_name], config, is_transposed))
        experts.forward = functools.partial(experts_forward, experts)


def factors_of(experts: nn.Module) -> dict[str, ExpertFactors]:
    """Return the factors in a module of experts by the names of their parameters there."""
    children = experts.named_children()
    return {name.removeprefix(FACTORS): child for name, child in children if isinstance(child, ExpertFactors)}


def factors_in(model: nn.Module) -> dict[str, ExpertFactors]:
    """Return all factors of a model by the full names of their parameters."""
    return {
        f"{module_name}.{name}": factors
        for module_name, module in model.named_modules()
        for name, factors in factors_of(module).items()
    }


def remove_factors(model: nn.Module) -> None:
    """Take the adapters off again, in place."""
    for module in list(model.modules()):
        for name in factors_of(module):
            delattr(module, FACTORS + name)
            module.__dict__.pop("forward", None)


def experts_forward(experts: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the experts with W' in the place of W: an attribute goes before the parameter of the same name."""
    factors = {name: one for name, one in factors_of(experts).items() if not one.is_off}
    for name, one in factors.items():
        merged = MergedExperts.apply(experts._parameters[name], one.a, one.b, one.scale, one.is_transposed)
        experts.__dict__[name] = merged
    try:
        return type(experts).forward(experts, *args, **kwargs)
    finally:
        for name in factors:
            del experts.__dict__[name]
