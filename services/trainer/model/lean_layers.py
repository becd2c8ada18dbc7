"""Layers that need less memory in the backward pass, and compute again what is cheap.

    RMS norm     w * (x * r), r = 1 / sqrt(mean(x^2) + eps)     keeps x and r; transformers' keeps x r, too, and in
                                                                bfloat16 also x in float32
    gated MLP    down(silu(gate) * up)                          keeps gate and up; transformers' two more like these
    embedding    w[tokens]                                      adds to the rows of these tokens in the sum of
                                                                gradients, if that is there before the pass; PyTorch's
                                                                makes another gradient, of the whole vocabulary

The results are those of transformers' own layers, bit for bit; gradients may be rounded otherwise. A norm or an MLP is
replaced only where a small copy of it, with random weights, has the same results: no list of model names is consulted.
The trial of the architecture (`passes/trial.py`) compares the gradients of the whole model. Measured in
docs/decisions/2026-11-27-norms-and-mlps-keep-less.md.
"""

import copy
import inspect
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding, linear, silu
from torch.nn.utils import skip_init

from services.trainer.model.errors import TRIAL_ERRORS

WIDTH = 16  # width of the small copies
MASTER = "onbeat_master"  # attribute of a parameter: its master in float32
SCALES = (1e-2, 1.0, 1e2, 1e4)  # scales of the rows of their input; some layers clamp large values


class LeanRMSNorm(torch.autograd.Function):
    """A function (x [..., D], weight [D], eps) -> [..., D]; inside it is float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        precise = x.to(torch.float32)
        scale = torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (precise * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, grad_weight = x.to(torch.float32) * scale, None
        if ctx.needs_input_grad[1]:  # a frozen norm (LoRA) has none
            grad_weight = (grads[0] * normed.to(x.dtype)).flatten(0, -2).sum(0)
        grad_normed = (grads[0] * weight).to(torch.float32)
        along = (grad_normed * normed).mean(-1, keepdim=True)
        return grad_normed.addcmul_(normed, along, value=-1.0).mul_(scale).to(x.dtype), grad_weight, None


class LeanGatedMLP(torch.autograd.Function):
    """A function (gate [..., I], up [..., I], weight of the down projection [D, I]) -> [..., D]."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up, weight)
        return linear(silu(gate).mul_(up), weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        activated, grad_weight = silu(gate), None
        grad_product = grads[0] @ weight
        grad_up = grad_product * activated
        if ctx.needs_input_grad[2]:  # a frozen projection (LoRA) has none
            grad_weight = grads[0].flatten(0, -2).T @ activated.mul_(up).flatten(0, -2)
        return torch.ops.aten.silu_backward(grad_product.mul_(up), gate), grad_up, grad_weight


class EmbeddingRows(torch.autograd.Function):
    """A function (weight [V, D], token ids [...], id without gradient) -> [..., D]."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, token_ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        ctx.save_for_backward(weight, token_ids)
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        return embedding(token_ids, weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        weight, token_ids = ctx.saved_tensors
        kept = kept_gradient(weight)
        if kept is None:
            added = torch.ops.aten.embedding_dense_backward(grads[0], token_ids, len(weight), ctx.padding_idx, False)
            return added, None, None
        ids, places = distinct(token_ids)
        rows = torch.ops.aten.embedding_dense_backward(grads[0].to(kept.dtype), places, len(ids), -1, False)
        kept.index_add_(0, ids, rows.masked_fill_((ids == ctx.padding_idx)[:, None], 0.0))
        return None, None, None


def distinct(token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the distinct ids [I], and for each token the place of its id among them. On the meta device, where a plan
    of the memory has tokens without values, all are taken to be distinct."""
    return (token_ids.flatten(), token_ids) if token_ids.is_meta else token_ids.unique(return_inverse=True)


def kept_gradient(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor in which this parameter's gradient adds up, if there is one: `backward` of a function may add
    to it and return no gradient, which saves the memory of another one. It is the gradient of the parameter's master,
    where it has one besides itself (`MasterAdamW`).

    `torch.autograd.grad` and hooks of the weight get no gradient then. The trainer needs neither of them there.
    """
    master: torch.Tensor = getattr(weight, MASTER, weight)
    return master.grad if weight.is_leaf else None


def use_lean_layers(model: nn.Module) -> None:
    """Give the embedding, RMS norms and gated MLPs of a model in eval mode a class that needs less memory, where the
    results are the same bits."""
    for module in model.modules():
        if type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq or module.sparse):
            module.__class__ = LeanEmbedding
        for small_copy, lean_class in ((small_norm, lean_norm), (small_mlp, lean_mlp)):
            small = small_copy(module)
            if small is not None and has_same_results(small, lean := lean_class(type(module))):
                module.__class__ = lean


class LeanEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = EmbeddingRows.apply(self.weight, input, self.padding_idx)
        return rows


def lean_norm(base: type[nn.Module]) -> type[nn.Module]:
    def forward(norm: Any, x: torch.Tensor) -> Any:
        return LeanRMSNorm.apply(x, norm.weight, norm.variance_epsilon)

    return type("LeanNorm", (base,), {"forward": forward})


def lean_mlp(base: type[nn.Module]) -> type[nn.Module]:
    def forward(mlp: Any, x: torch.Tensor) -> Any:
        if type(mlp.down_proj) is not nn.Linear:  # it was given an adapter after `use_lean_layers`
            return base.forward(mlp, x)
        return LeanGatedMLP.apply(mlp.gate_proj(x), mlp.up_proj(x), mlp.down_proj.weight)

    return type("LeanMLP", (base,), {"forward": forward})


def small_norm(module: Any) -> Any | None:
    """Return a narrow copy, on the CPU, of a module that looks like an RMS norm."""
    if [*tensors_of(module)] != ["weight"] or not hasattr(module, "variance_epsilon"):
        return None
    return copy_with(module, weight=nn.Parameter(torch.empty(WIDTH)))


def small_mlp(module: Any) -> Any | None:
    """Return a narrow copy, on the CPU, of a module that looks like a gated MLP whose last projection has no bias."""
    projections: dict[str, Any] = {name: getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")}
    if not all(type(projection) is nn.Linear for projection in projections.values()):
        return None
    has_bias = {name: projection.bias is not None for name, projection in projections.items()}
    if has_bias["down_proj"] or len(tensors_of(module)) > len(projections) + sum(has_bias.values()):
        return None
    return copy_with(module, **{name: skip_init(nn.Linear, WIDTH, WIDTH, bias=has_bias[name]) for name in has_bias})


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(chain(module.named_parameters(), module.named_buffers()))


def copy_with(module: nn.Module, **parts: Any) -> Any:
    """Return a copy of the module with these in place of all that has tensors."""
    copied = copy.copy(module)
    copied._parameters, copied._buffers, copied._modules = {}, {}, dict(module._modules)
    for name, part in parts.items():
        setattr(copied, name, part)
    return copied


@torch.no_grad()
def has_same_results(module: Any, lean: type[Any]) -> bool:
    """Compare the results of both classes, bit for bit, for a random input. The module's parameters are overwritten."""
    layer_type = type(module)
    if len(inspect.signature(layer_type.forward).parameters) != 2:  # self and x
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, len(SCALES), WIDTH, generator=generator) * torch.tensor(SCALES)[:, None]
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    for dtype in (torch.float32, torch.bfloat16):
        module.to(dtype)
        try:
            expected, computed = layer_type.forward(module, x.to(dtype)), lean.forward(module, x.to(dtype))
        except TRIAL_ERRORS:  # it only looked like one of these
            return False
        if computed.dtype != expected.dtype or not torch.equal(computed, expected):
            return False
    return True
