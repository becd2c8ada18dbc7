"""Low-rank adapters (arXiv 2106.09685) by PEFT. Only the trainer has them: rollouts get ordinary weights.

    policy      y = W' x,  W' = W + (alpha / r) B A    rounded to the compute dtype; W frozen, A and B trained
    published   W' under W's own name: the bits that the policy computes with
    reference   y = W x: the same model with its adapters off, no copy

PEFT's own forward is W x + (alpha / r) B A x. In bfloat16 that is not the policy that rollouts sample with: an update
smaller than half a step of W's grid is trained on and never published. Measured on SmolLM2-135M (rank 16, learning rate
2e-5, 40 steps on one batch): log-probabilities had moved by 0.95 nats per token in the trainer and by 0.75 in what it
published, a mean gap of 0.21 where noise is 0.04. Here the gap is 0, and small updates add up in the float32 masters
(optimizer.py), as they do without adapters.
"""

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.nn.utils import skip_init

from onbeat.config import LoraConfig
from services.trainer.model.errors import TRIAL_ERRORS
from services.trainer.model.expert_lora import add_factors, expert_parameters, factors_in, is_experts

ADAPTER = "default"
NUMBERS = re.compile(r"\.\d+\.")
Whole = Callable[[torch.Tensor], torch.Tensor]


def add_adapters(model: Any, config: LoraConfig, seed: int) -> None:
    """Put adapters on linear layers and experts, in place, in their dtype. From now on only these require a gradient.

    B starts at 0, so the policy is unchanged; A is drawn on the CPU from `seed`. The output head takes none: it may be
    tied to the embedding. Raises ValueError for a target module that the model does not have.

    The layers are wrapped one by one: PEFT's search by name would also wrap fused experts, whose parts were once linear
    layers named like those of a dense MLP.
    """
    import peft
    from peft.tuners.lora import Linear

    targets, experts = targets_in(model, config)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        alpha: Any = config.alpha  # PEFT declares an int and only divides it
        peft_config = peft.LoraConfig(r=config.rank, lora_alpha=alpha, use_rslora=config.use_rslora)
        for name in targets:
            base = model.get_submodule(name)
            layer: Any = Linear(base, ADAPTER, peft_config, r=config.rank, lora_alpha=alpha)
            layer.forward = functools.partial(merged_forward, layer)
            model.set_submodule(name, layer)
        add_factors(model, experts, config)


def targets_in(model: Any, config: LoraConfig) -> tuple[list[str], list[str]]:
    """Return the full names of the linear layers to adapt, and of the parameters of experts. Raises ValueError as
    `add_adapters`."""
    head = model.get_output_embeddings()
    bypassed = model.passes.bypassed if hasattr(model, "passes") else frozenset()
    called = [(name, module) for name, module in model.named_modules() if name and role_of(model, name) not in bypassed]
    linear = [name for name, module in called if is_plain(type(module)) and module is not head]
    experts = [f"{name}.{part}" for name, module in called if is_experts(module) for part in expert_parameters(module)]
    if not linear and not experts:
        raise ValueError("lora: the model has no linear layers to adapt; leave [lora] out to train all parameters")
    if config.target_modules == "all-linear":
        return linear, experts
    existing, wanted = {name.rpartition(".")[2] for name in (*linear, *experts)}, set(config.target_modules)
    if not wanted or wanted - existing:
        raise ValueError(
            f"lora.target_modules: no layers to adapt are named {', '.join(sorted(wanted - existing)) or 'so'}; "
            f"use 'all-linear' or some of {', '.join(sorted(existing))}"
        )
    linear, experts = ([name for name in names if name.rpartition(".")[2] in wanted] for names in (linear, experts))
    return linear, experts


def is_plain(kind: Any) -> bool:
    """Return whether layers of this class compute x W^T + b and nothing else, unlike some routers that inherit it."""
    if kind is torch.nn.Linear or not issubclass(kind, torch.nn.Linear):
        return kind is torch.nn.Linear
    layer = skip_init(torch.nn.Linear, 3, 2, device="cpu", dtype=torch.float64).requires_grad_(False)
    layer.weight.copy_(torch.arange(6.0).view(2, 3))
    layer.bias.copy_(torch.arange(2.0))
    inputs = torch.tensor([[1.0, -2.0, 4.0]], device="cpu", dtype=torch.float64)
    try:
        outputs = kind.forward(layer, inputs)
    except TRIAL_ERRORS:  # it needs more than a linear layer has
        return False
    return isinstance(outputs, torch.Tensor) and torch.equal(outputs, layer(inputs))


def role_of(model: Any, name: str) -> str:
    """Return the class of the module that a layer belongs to, and its name there: the same in models of any size."""
    parent, _, own_name = name.rpartition(".")
    return f"{type(model.get_submodule(parent)).__name__}.{own_name}"


@torch.no_grad()
def bypassed_layers(model: Any, token_ids: torch.Tensor) -> frozenset[str]:
    """Return the roles of linear layers and experts that a pass over the tokens [1, T] never calls, such as those whose
    weights the model reads itself: adapters there would have no effect and no gradient."""
    named = model.named_modules()
    roles = {module: role_of(model, name) for name, module in named if is_plain(type(module)) or is_experts(module)}
    called: set[str] = set()

    def record(module: torch.nn.Module, *_: Any) -> None:
        called.add(roles[module])

    handles = [module.register_forward_hook(record) for module in roles]
    try:
        model(token_ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return frozenset(roles.values()) - called


def adapted_layers(model: Any) -> dict[str, Any]:
    """Return PEFT's layers by the name of the linear layer that each one wraps; empty for a model without adapters.

    A process that added adapters has imported PEFT already; others skip the import, which is slow and may be missing.
    """
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def merged_forward(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """Compute [..., in] -> [..., out] in place of PEFT's forward."""
    base = layer.get_base_layer()
    if layer.disable_adapters:
        outputs: torch.Tensor = base(inputs)
    else:
        outputs = MergedLinear.apply(inputs, base.weight, base.bias, *adapter(layer))
    return outputs


def adapter(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return (A [r, in], B [out, r], alpha / r)."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight, layer.scaling[ADAPTER]


def merged_weight(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W' [out, in], rounded once."""
    return torch.addmm(weight, b, a, alpha=scale)


class MergedLinear(torch.autograd.Function):
    """The function y = W' x with gradients for x, A and B. The backward pass computes W' again; it is not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight, a, b)
        ctx.scale = scale
        return torch.nn.functional.linear(inputs, merged_weight(weight, a, b, scale), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, weight, a, b = ctx.saved_tensors
        grad_inputs = grad @ merged_weight(weight, a, b, ctx.scale) if ctx.needs_input_grad[0] else None
        rows, grad_rows = inputs.flatten(0, -2), grad.flatten(0, -2)
        grad_a = ((grad_rows @ b).T @ rows) * ctx.scale
        grad_b = (grad_rows.T @ (rows @ a.T)) * ctx.scale
        return grad_inputs, None, None, grad_a, grad_b, None


@torch.no_grad()
def published_tensors(
    model: Any, whole: Whole = lambda parameter: parameter, skip: Container[str] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the model's state as if it had no adapters, merged one tensor at a time; the model itself is unchanged.

    Names, order and shapes are those of the base model; without adapters this is `named_parameters()`, then the buffers
    that belong to the state, which training never changes. `whole` puts the shards of a parameter together, in the
    compute dtype. Parameters named in `skip` are left out.
    """
    layers, experts = adapted_layers(model), factors_in(model)
    for name, parameter in model.named_parameters():
        if name in skip:
            continue
        layer_name, _, suffix = name.partition(".base_layer.")
        if suffix == "weight":
            a, b, scale = adapter(layers[layer_name])
            yield f"{layer_name}.weight", merged_weight(whole(parameter), whole(a), whole(b), scale)
        elif name in experts:
            yield name, experts[name].merge(whole(parameter), whole(experts[name].a), whole(experts[name].b))
        elif ".lora_" not in name:
            yield base_name(name), whole(parameter)
    yield from persistent_buffers(model)


def published_sizes(model: Any) -> dict[str, int]:
    """Return the names of `published_tensors`, in order, with their numbers of elements."""
    tensors = chain(model.named_parameters(), persistent_buffers(model))
    return {base_name(name): t.numel() for name, t in tensors if ".lora_" not in name}


def reach(model: Any) -> tuple[float, dict[str, float]]:
    """Return the share of the model's weights that have an adapter, and the shares of those that have none, the largest
    first. Layers that differ in their numbers alone count together, as `layers.*.mlp.gate`."""
    adapted = {f"{name}.weight" for name in adapted_layers(model)} | factors_in(model).keys()
    base = {base_name(name): p.numel() for name, p in model.named_parameters() if ".lora_" not in name}
    total, left_out = sum(base.values()), Counter[str]()
    for name in base.keys() - adapted:
        left_out[NUMBERS.sub(".*.", name).removesuffix(".weight")] += base[name]
    shares = {name: number / total for name, number in left_out.most_common()}
    return 1.0 - sum(shares.values()), shares


def persistent_buffers(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return what a checkpoint of the model holds besides parameters, such as the correction biases of some routers."""
    state = model.state_dict(keep_vars=True)
    return [(name, tensor) for name, tensor in state.items() if not isinstance(tensor, torch.nn.Parameter)]


def base_name(name: str) -> str:
    """Return the parameter's name in the model without adapters."""
    return name.replace(".base_layer.", ".")


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Turn adapters off inside the block: the model is then the reference policy. For passes without gradient."""
    layers, experts = adapted_layers(model).values(), factors_in(model).values()
    assert layers or experts, "a model without adapters has no base to fall back to; its reference is a frozen copy"

    def turn(is_off: bool) -> None:
        for layer in layers:  # PEFT's own switch would also turn requires_grad off, which a sharded model must not see
            layer._disable_adapters = is_off
        for factors in experts:
            factors.is_off = is_off

    turn(is_off=True)
    try:
        yield
    finally:
        turn(is_off=False)
