"""Arrivals during a load: they are gathered, whole modules are distinguished from parts, and errors come at the end."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from onbeat.engines import BadWeightFile
from onbeat.engines.arrivals import gathered, whole_modules
from services.rollout.engines.weight_files import check_weight_file
from tests.rollout_fakes import arriving

LAYERS = [
    f"model.layers.{layer}.{name}"
    for layer in (3, 13)
    for name in (
        "self_attn.q_proj.weight",
        "self_attn.q_proj.bias",
        "self_attn.k_proj.weight",
        "mlp.gate.weight",
        "mlp.experts.0.up_proj.weight",
        "mlp.experts.7.down_proj.weight",
        "mlp.shared_expert.up_proj.weight",
        "mlp.shared_expert.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    )
]
LAYER = "model.layers.3"
NAMES = ["model.embed_tokens.weight", *LAYERS, "model.norm.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("changed", "siblings"),
    [
        ("self_attn.k_proj.weight", {"self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.k_proj.weight"}),
        ("mlp.experts.7.down_proj.weight", {"mlp.experts.0.up_proj.weight", "mlp.experts.7.down_proj.weight"}),
        (
            "mlp.shared_expert.up_proj.weight",
            {"mlp.shared_expert.up_proj.weight", "mlp.shared_expert.down_proj.weight"},
        ),
        ("mlp.gate.weight", {"mlp.gate.weight"}),
        ("input_layernorm.weight", {"input_layernorm.weight", "post_attention_layernorm.weight"}),
    ],
)
def test_a_changed_tensor_brings_what_it_may_be_fused_with(changed: str, siblings: set[str]) -> None:
    assert whole_modules([f"model.layers.3.{changed}"], NAMES) == {f"model.layers.3.{name}" for name in siblings}


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
def test_modules_outside_the_layers_stand_alone(name: str) -> None:
    assert whole_modules([name], NAMES) == {name}


@pytest.mark.parametrize(
    ("batches", "must_be_all", "message"),
    [
        ([[f"{LAYER}.self_attn.q_proj.weight"]], False, "2 tensors did not arrive, but modules load as a whole"),
        ([["model.layers.7.mlp.gate.weight"]], False, "1 tensors arrived that the model does not have"),
        ([["model.norm.weight"], ["model.norm.weight"]], False, "1 tensors arrived twice"),
        ([NAMES[1:]], True, "1 tensors did not arrive, but no version is served to take them from"),
        ([], True, "23 tensors did not arrive"),
    ],
)
async def test_names_that_make_no_whole_load_are_refused(batches, must_be_all: bool, message: str) -> None:
    async with gathered(arriving(batches), NAMES, must_be_all=must_be_all) as arrived:
        while await arrived.take():
            pass
        with pytest.raises(ValueError, match=message):
            arrived.check()


def write_truncated(weights: dict[str, torch.Tensor], file: Path) -> None:
    save_file(weights, file)
    file.write_bytes(file.read_bytes()[:-10])


def write_without_a_tensor(weights: dict[str, torch.Tensor], file: Path) -> None:
    save_file({"b": weights["b"]}, file)


def write_a_tensor_more(weights: dict[str, torch.Tensor], file: Path) -> None:
    save_file({**weights, "c": torch.zeros(1)}, file)


def write_a_wrong_shape(weights: dict[str, torch.Tensor], file: Path) -> None:
    save_file({**weights, "b": weights["b"][:-1].clone()}, file)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda *_: None, "cannot read the weights in .*No such file"),
        (write_truncated, "cannot read the weights"),
        (write_without_a_tensor, r"1 tensors are missing \['a'\], 0 are unexpected"),
        (write_a_tensor_more, r"0 tensors are missing \[\], 1 are unexpected \['c'\]"),
        (write_a_wrong_shape, r"b in .* has shape \(2,\), the model's is \(3,\)"),
    ],
)
def test_file_of_another_model_is_refused(write, message: str, tmp_path: Path) -> None:
    weights, file = {"a": torch.zeros(2, 2), "b": torch.zeros(3)}, tmp_path / "model.safetensors"
    write(weights, file)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with pytest.raises(BadWeightFile, match=message):
        check_weight_file(file, shapes, is_tied=False)


async def test_names_that_arrive_during_other_work_are_taken_together() -> None:
    async with gathered(arriving([[name] for name in NAMES]), NAMES, must_be_all=True) as arrived:
        assert await arrived.take() == NAMES[:1]
        await asyncio.sleep(0.05)
        assert await arrived.take() == NAMES[1:]
        assert await arrived.take() == []
        arrived.check()


async def test_arrivals_before_an_error_are_taken_before_it_is_raised() -> None:
    async def failing() -> AsyncIterator[Sequence[str]]:
        yield ["lm_head.weight"]
        raise OSError("the stream broke")

    async with gathered(failing(), NAMES, must_be_all=False) as arrived:
        assert await arrived.take() == ["lm_head.weight"]
        assert await arrived.take() == []
        with pytest.raises(OSError, match="the stream broke"):
            arrived.check()


async def test_leaving_ends_the_iterator() -> None:
    has_ended = asyncio.Event()

    async def endless() -> AsyncIterator[Sequence[str]]:
        try:
            await asyncio.sleep(60)
            yield []
        finally:
            has_ended.set()

    async with gathered(endless(), NAMES, must_be_all=False):
        await asyncio.sleep(0)
    assert has_ended.is_set()
