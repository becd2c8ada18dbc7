"""Adapters train, ordinary weights are published, and both are the same policy bit for bit."""

import sys

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, Qwen2Config

from onbeat.config import LoraConfig
from services.trainer.model.expert_lora import factors_in
from services.trainer.model.lora import adapted_layers, add_adapters, bypassed_layers, published_tensors
from services.trainer.model.model import Passes, frozen_base, load_frozen, response_logprobs, set_up
from services.trainer.passes.shrink import random_model
from tests.architectures import CPU, Row
from tests.trainer_fixtures import gradients, tiny_config, tiny_model

CONFIG = LoraConfig(rank=4, alpha=8.0)


def test_a_model_without_adapters_needs_no_peft(monkeypatch):
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.setitem(sys.modules, "peft.tuners.lora", None)  # as where it is not installed
    model = tiny_model(dtype=torch.float32)
    assert frozen_base(model) is not model
    published, parameters = (
        [(name, tensor.data_ptr()) for name, tensor in pairs]
        for pairs in (published_tensors(model), model.named_parameters())
    )
    assert published == parameters


def adapted(dtype, config=CONFIG, config_class=LlamaConfig):
    """Return a tiny model whose adapters have been moved away from zero."""
    model = tiny_model(tiny_config(config_class), dtype)
    add_adapters(model, config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            weight = layer.lora_B["default"].weight
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    return model


def test_new_adapters_change_nothing_and_are_all_that_trains(batch):
    base, model = (tiny_model(dtype=torch.bfloat16) for _ in range(2))
    add_adapters(model, CONFIG, seed=0)
    assert torch.equal(response_logprobs(model, batch, 1.0)[0], response_logprobs(base, batch, 1.0)[0])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2  # A and B of q k v o gate up down, in two layers
    assert all(".lora_" in name and p.dtype == torch.bfloat16 for name, p in trained.items())


def test_adapters_depend_on_the_seed_only():
    def drawn(seed, global_seed):
        model = tiny_model(dtype=torch.float32)
        torch.manual_seed(global_seed)
        add_adapters(model, CONFIG, seed)
        return torch.cat([p.flatten() for p in model.parameters() if p.requires_grad]), torch.rand(1)

    first, after = drawn(3, 7)
    second, _ = drawn(3, 8)
    torch.manual_seed(7)
    assert torch.equal(first, second)
    assert torch.equal(after, torch.rand(1))  # nobody else's random numbers are used up
    assert not torch.equal(first, drawn(4, 7)[0])


@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])  # Qwen2's projections have biases
def test_gradients_equal_those_of_pefts_own_forward(config_class, batch):
    model = adapted(torch.float64, config_class=config_class)
    found_logprobs, _ = response_logprobs(model, batch, 0.7)
    computed = gradients(model, found_logprobs)
    for layer in adapted_layers(model).values():
        del layer.forward  # W x + (alpha / r) B A x
    expected_logprobs, _ = response_logprobs(model, batch, 0.7)
    torch.testing.assert_close(found_logprobs, expected_logprobs, rtol=0, atol=1e-6)  # norms are float32 inside
    for name, gradient in gradients(model, expected_logprobs).items():
        torch.testing.assert_close(computed[name], gradient, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("config", [CONFIG, LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj"])])
def test_what_is_published_is_the_trained_policy_bit_for_bit(dtype, config, batch):
    model = adapted(dtype, config, Qwen2Config)
    published = frozen_base(model)
    load_frozen(published, published_tensors(model))
    assert not adapted_layers(published)
    assert torch.equal(response_logprobs(published, batch, 1.0)[0], response_logprobs(model, batch, 1.0)[0].detach())


@pytest.mark.parametrize("wrong", ["w_q", "lm_head", "embed_tokens"])
def test_an_unknown_target_is_refused_by_name(wrong):
    model = tiny_model(dtype=torch.float32)
    config = LoraConfig(target_modules=["q_proj", wrong])
    with pytest.raises(ValueError, match=rf"named {wrong}; .* down_proj, gate_proj, k_proj, o_proj, q_proj, "):
        add_adapters(model, config, seed=0)


# ---- families whose layers are more than linear layers --------------------------------------------------------------

TOKENS = torch.arange(1, 24)[None]
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
GLM4_MOE = {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
GLM4_MOE |= {"moe_intermediate_size": 16, "n_shared_experts": 1, "first_k_dense_replace": 1}
# PEFT takes their dense layers for parts of fused experts; routers of the last two are linear layers by class only.
FUSED = """
deepseek_v2 deepseek_v3 glm4_moe glm4_moe_lite dots1 ernie4_5_moe afmoe qwen3_next hunyuan_v1_moe exaone_moe solar_open
longcat_flash cohere2_moe phimoe llama4_text
""".split()  # noqa: SIM905


def adapted_family(config, **options):
    """Return a tiny model as the trial prepares it, with adapters that have been moved away from zero."""
    model = random_model(config, "eager")
    set_up(model, Passes("eager", True, bypassed=bypassed_layers(model, TOKENS)), CPU)
    add_adapters(model, LoraConfig(rank=4, alpha=8.0, **options), seed=1)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B["default"].weight.normal_(std=0.02)
        for factors in factors_in(model).values():
            factors.b.normal_(std=0.02)
    return model


def adapted_names(model):
    return {name.rpartition(".")[2] for name in adapted_layers(model)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(AutoConfig.for_model("glm4_moe", **SMALL, **GLM4_MOE), id="small glm4_moe"),
        pytest.param(
            AutoConfig.for_model(
                "phimoe", **SMALL, **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
            ),
            id="small phimoe",
        ),
        *[pytest.param(Row(name, name).config(), id=name) for name in FUSED],
    ],
)
def test_experts_stay_frozen_where_only_dense_layers_are_named(config):
    names = sorted(adapted_names(adapted_family(config)))
    model = adapted_family(config, target_modules=names)
    named = {name.rpartition(".")[2] for name in factors_in(model)}
    assert named <= set(names)  # `down_proj` is the name of a dense layer, and of a parameter of experts
    assert all(layer.get_base_layer().weight.dim() == 2 for layer in adapted_layers(model).values())
    published = frozen_base(model)
    load_frozen(published, published_tensors(model))
    with torch.no_grad():
        computed, expected = (one(TOKENS, use_cache=False).logits for one in (published, model))
    assert torch.equal(computed, expected)
    model(TOKENS, use_cache=False).logits.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if ".lora_A." in name}
    assert any(gradient is not None and gradient.any() for gradient in gradients.values())


@pytest.mark.slow
def test_a_dense_mlp_beside_experts_is_adapted():
    model = adapted_family(AutoConfig.for_model("glm4_moe", **SMALL, **GLM4_MOE))
    assert {f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")} <= adapted_layers(model).keys()


@pytest.mark.slow
def test_layers_whose_weight_the_model_reads_take_no_adapters():
    """Jamba multiplies by the weight of `dt_proj` itself."""
    config = Row("jamba", "jamba").config()
    model = adapted_family(config)
    assert {"in_proj", "x_proj", "out_proj"} <= adapted_names(model)
    assert "dt_proj" not in adapted_names(model)
    with pytest.raises(ValueError, match="no layers to adapt are named dt_proj"):
        adapted_family(config, target_modules=["dt_proj", "in_proj"])


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h"])
def test_projections_of_state_space_models_are_trained(family):
    model = adapted_family(Row(family, family).config())
    assert "out_proj" in adapted_names(model)
    model(TOKENS, use_cache=False).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)


def test_a_subclass_that_is_only_a_linear_layer_is_adapted():
    """Falcon's projections have a class of their own."""
    assert {"query_key_value", "dense"} <= adapted_names(adapted_family(Row("falcon", "falcon").config()))
