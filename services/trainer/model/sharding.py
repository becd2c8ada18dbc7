"""Sharding by FSDP2: every rank holds a share of each parameter, and all ranks run the model in lockstep.

    sharded float32 parameter --all-gather in the compute dtype--> layer computes --> gradient
    gradient --reduce-scatter in float32, summed--> the share's gradient, added up over micro-batches

A model is sharded layer by layer, and each layer may be read from its files just before: then a rank never holds more
than its share and one layer.

Gradients are sums over ranks, not means: the loss is divided once, at the barrier. The float32 shares are the masters
that the optimizer moves. Their rounded values are published: the bits that the layers compute with.

All ranks must run the same number of passes. `deal` gives each rank groups of about equally many tokens; a rank whose
share is empty (or shorter than another's) runs a placeholder, with the loss `(logprobs * 0).sum()`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from services.trainer.model.lora import base_name
from services.trainer.model.rounding import spread_masters
from services.trainer.model.tensor_files import StoredWeights
from services.trainer.world import World

T = TypeVar("T")


def shard(model: Any, world: World, compute_dtype: torch.dtype, stored: StoredWeights | None = None) -> None:
    """Shard a transformers decoder in place, by layer; the root holds embeddings, norm and head (tied ones stay tied).

    Before: every rank has the same full weights (or none, if the model was opened and they are in `stored`), with
    adapters and checkpointing in place. After: trainable parameters are float32, frozen ones keep their dtype. Frozen
    relatives (reference, old policy) are copied before and sharded by a separate call. Raises ValueError for a model
    without a list of layers.
    """
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no list of layers to shard by; use ONBEAT_PARALLELISM=ddp")
    mesh = init_device_mesh(world.device.type, (world.size,))
    sum_dtype = torch.promote_types(compute_dtype, torch.float32)  # sums of gradients: float64 for a float64 model
    precision = MixedPrecisionPolicy(compute_dtype, sum_dtype, cast_forward_inputs=False)
    names = {module: name for name, module in model.named_modules()}
    for module in [*layers, model]:
        fill(module, names[module], stored)
        fully_shard(module, mesh=mesh, mp_policy=precision)
        module.set_gradient_divide_factor(1.0)  # the sum: by default FSDP divides by the number of ranks
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum
    model.call_unsharded = lambda function, *args, **kwargs: function(model, *args, **kwargs)
    register_fsdp_forward_method(model, "call_unsharded")


def fill(module: nn.Module, prefix: str, stored: StoredWeights | None) -> None:
    """Give a module that is about to be sharded its whole weights, in float32 where they are trained.

    `prefix`: the module's name in the model. Parameters that are already sharded (the root's layers) are left alone.
    """
    for name, parameter in module.named_parameters(prefix):
        if isinstance(parameter, DTensor):
            continue
        if stored is not None and base_name(name) in stored.files:  # all but adapters
            parameter.data = stored.read(base_name(name)).to(parameter.device, parameter.dtype)
        if parameter.requires_grad:
            parameter.data = spread_masters(name, parameter.data)


def call(function: Callable[..., T], model: Any, *args: Any, **kwargs: Any) -> T:
    """Call `function(model, ...)` as if it were the model's forward.

    A function that uses parts of a sharded model by itself (its decoder, the weight of its head) must go through here:
    the root's parameters are whole only inside, and only gradients of this call's outputs are reduced.
    """
    run = getattr(model, "call_unsharded", None)
    return function(model, *args, **kwargs) if run is None else run(function, *args, **kwargs)


@torch.no_grad()
def gather_full(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gather a whole sharded parameter, in `dtype`, on every rank: all must call it, with parameters in the same order.

    A parameter that is not sharded is returned as it is, in `dtype`.
    """
    part = parameter.detach().to(dtype)
    return part.full_tensor() if isinstance(part, DTensor) else part


@torch.no_grad()
def load_shards(model: Any, tensors: Iterable[tuple[str, torch.Tensor]], holders: dict[str, int]) -> None:
    """Overwrite a sharded model with whole weights by name, each from the rank that holds it. All must call it."""
    model.reshard()  # a pass without a backward leaves the root's parameters whole
    by_name = dict(tensors)
    for name, parameter in model.named_parameters():
        if name in by_name:
            sent = by_name[name].to(parameter.device, parameter.dtype)
        else:
            sent = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        mesh, placements = parameter.device_mesh, parameter.placements
        parameter.copy_(distribute_tensor(sent, mesh, placements, src_data_rank=holders[name]))
        del sent  # before the next one is allocated


def deal(costs: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Share out groups by their tokens: indices for each rank, ascending. The longest goes first, to the lightest rank.

    >>> deal([5, 9, 4, 1], 2)
    [[1, 3], [0, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        lightest = loads.index(min(loads))
        shares[lightest].append(index)
        loads[lightest] += costs[index]
    return [sorted(share) for share in shares]
