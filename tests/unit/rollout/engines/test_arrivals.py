"""What arrives during a load is gathered, whole modules are distinguished from parts, and errors come at the end."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

import pytest

from services.rollout.engines.arrivals import gathered, whole_modules

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


def test_nothing_changed_brings_nothing() -> None:
    assert whole_modules([], NAMES) == set()


async def arriving(batches: Iterable[Sequence[str]]) -> AsyncIterator[Sequence[str]]:
    for names in batches:
        yield names
        await asyncio.sleep(0)


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
