"""The linear layers that are packed without vLLM's loaders: which ones, and when."""

from collections.abc import Callable

import pytest
import torch
from torch.nn.functional import linear

from services.rollout.engines import vllm_linears
from services.rollout.engines.vllm_linears import PlainLinears

QKV = ("q.weight", "k.weight", "v.weight")
Arrange = Callable[[torch.Tensor], torch.Tensor]


class Method:
    """A layer's method that packs, as vLLM's does on a CPU."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        layer.packed = layer.weight.data.clone()
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return linear(x, layer.packed)


class Layer(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.output_size, self.input_size = weight.shape
        self.params_dtype, self.quant_method, self.packed = torch.float32, Method(), weight


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(4, 8, generator=generator) for name in QKV}


def joined(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name] for name in QKV])


def loaded_by_vllm(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, arrange: Arrange = lambda weight: weight
) -> tuple[PlainLinears, Layer]:
    """Return a layer that vLLM has loaded from these tensors, as it arranges them, and its model's layers after it."""
    layer = Layer(arrange(joined(tensors)))
    monkeypatch.setattr(vllm_linears, "find_candidates", lambda model: [(QKV, layer)])
    linears = PlainLinears(torch.nn.Module())
    assert linears.load(QKV, tensors.__getitem__) == list(QKV)
    linears.learn(set(QKV), tensors.__getitem__)
    return linears, layer


def test_plain_layer_is_packed_once_all_of_its_tensors_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = checkpoint(1), checkpoint(2)
    linears, layer = loaded_by_vllm(first, monkeypatch)
    linears.begin()
    assert linears.load(["k.weight", "norm.weight", "v.weight"], second.__getitem__) == ["norm.weight"]
    assert torch.equal(layer.packed, joined(first))
    assert linears.load(["q.weight"], second.__getitem__) == []
    assert torch.equal(layer.packed, joined(second))


def test_tensors_of_a_failed_update_do_not_count_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = checkpoint(1), checkpoint(2)
    linears, layer = loaded_by_vllm(first, monkeypatch)
    linears.begin()
    linears.load(["q.weight", "k.weight"], second.__getitem__)
    linears.begin()
    linears.load(["v.weight"], second.__getitem__)
    assert torch.equal(layer.packed, joined(first))


@pytest.mark.parametrize(
    "arrange",
    [lambda weight: weight.flip(0), lambda weight: 1 + weight, lambda weight: weight.roll(1, 1)],
    ids=["rows in another order", "moved by one", "columns in another order"],
)
def test_layer_that_vllm_arranges_otherwise_stays_vllms(arrange: Arrange, monkeypatch: pytest.MonkeyPatch) -> None:
    linears, _ = loaded_by_vllm(checkpoint(1), monkeypatch, arrange)
    assert linears.load(QKV, checkpoint(2).__getitem__) == list(QKV)


def test_layer_of_another_size_than_its_tensors_stays_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    linears, _ = loaded_by_vllm(checkpoint(1), monkeypatch, lambda weight: torch.cat([weight, weight[:1]]))
    assert linears.load(QKV, checkpoint(2).__getitem__) == list(QKV)


def test_constant_tensors_prove_nothing_and_are_tried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    constant = checkpoint(1) | {"q.weight": torch.ones(4, 8)}
    linears, _ = loaded_by_vllm(constant, monkeypatch)
    assert linears.load(QKV, checkpoint(2).__getitem__) == list(QKV)
    linears, layer = loaded_by_vllm(constant, monkeypatch)
    layer.packed = joined(checkpoint(2))
    linears.learn(set(QKV), checkpoint(2).__getitem__)
    assert linears.load(QKV, checkpoint(3).__getitem__) == []
