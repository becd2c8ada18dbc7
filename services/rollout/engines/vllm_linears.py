"""The linear layers of a vLLM model on a CPU whose weight is the checkpoint's tensors, one below the other.

On a CPU such a layer computes with a packed copy of its weight, and keeps nothing else. vLLM's own reload passes each
tensor through its loaders twice, first to count what they load, which takes longer than to copy and pack it. Here the
tensors of a layer are joined and packed, by the layer's own method.

    candidate   by its names and its kind: it may be such a layer (`packed_modules_mapping` has the parts of fused ones)
    plain       tried once, after an update by vLLM's own loaders: packed from the same tensors, it computes the same

All other layers are vLLM's, and so is every layer until it is tried.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.platforms import current_platform

ReadTensor = Callable[[str], torch.Tensor]
NUM_PROBES = 4  # rows that a layer is tried on


class PlainLinears:
    """The plain layers of a model, by the names of their tensors in the checkpoint."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._candidates = dict(find_candidates(model)) if current_platform.is_cpu() else {}  # not yet tried
        self._layers: dict[tuple[str, ...], Any] = {}
        self._parts: dict[str, tuple[str, ...]] = {}  # the tensors of the same layer, by the name of each
        self._waiting: dict[tuple[str, ...], set[str]] = {}  # arrived tensors of incomplete layers

    def begin(self) -> None:
        """Begin an update: what has arrived before is void."""
        self._waiting.clear()

    @torch.no_grad()
    def load(self, names: Sequence[str], read: ReadTensor) -> list[str]:
        """Pack the plain layers that these tensors complete. Return the tensors that vLLM has to load."""
        others = []
        for name in names:
            parts = self._parts.get(name)
            if parts is None:
                others.append(name)
                continue
            arrived = self._waiting.setdefault(parts, set())
            arrived.add(name)
            if len(arrived) == len(parts):
                pack(self._layers[parts], self._layers[parts], [read(part) for part in parts])
                del self._waiting[parts]
        return others

    @torch.no_grad()
    def learn(self, names: set[str], read: ReadTensor) -> None:
        """Try the candidates that vLLM has just loaded from these tensors. One with a constant tensor, which may lie in
        any order, is tried after a later update."""
        for parts in [parts for parts in self._candidates if names.issuperset(parts)]:
            tensors = [read(part) for part in parts]
            if any((tensor == tensor.flatten()[:1]).all() for tensor in tensors):
                continue
            layer = self._candidates.pop(parts)
            if is_plain(layer, tensors):
                self._layers[parts] = layer
                self._parts |= dict.fromkeys(parts, parts)


def find_candidates(model: torch.nn.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the names of its tensors, and the layer, for each layer that is packed and has no other parameter."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for path, layer in model.named_modules():
        is_linear = isinstance(layer, LinearBase) and type(layer.quant_method) is UnquantizedLinearMethod
        if is_linear and layer.tp_size == 1 and [name for name, _ in layer.named_parameters()] == ["weight"]:
            parent, dot, name = path.rpartition(".")
            if layer.weight.numel() == 0:  # the packed copy is all that it has
                yield tuple(f"{parent}{dot}{part}.weight" for part in fused.get(name, [name])), layer


def pack(layer: Any, target: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
    """Let `target` compute with a packed copy of the joined tensors, as the layer's method makes it."""
    weight = torch.cat(list(tensors)).to(layer.params_dtype)
    target.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))
    layer.quant_method.process_weights_after_loading(target)


def is_plain(layer: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the layer, loaded from these tensors, computes what they give when they are packed as they are."""
    is_matrix = all(tensor.ndim == 2 and tensor.shape[1] == layer.input_size for tensor in tensors)
    if not is_matrix or sum(map(len, tensors)) != layer.output_size:
        return False
    same = torch.nn.Module()
    pack(layer, same, tensors)
    generator = torch.Generator().manual_seed(0)
    probes = torch.randn(NUM_PROBES, layer.input_size, generator=generator).to(layer.params_dtype)
    return torch.equal(layer.quant_method.apply(layer, probes), layer.quant_method.apply(same, probes))
