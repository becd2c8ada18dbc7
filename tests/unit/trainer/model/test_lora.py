"""Adapters train, ordinary weights are published, and both are the same policy bit for bit."""

import sys

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from onbeat.config import LoraConfig
from services.trainer.model.lora import adapted_layers, add_adapters, published_tensors
from services.trainer.model.model import frozen_base, load_frozen, response_logprobs
from tests.trainer_fixtures import gradients, tiny_config, tiny_model

CONFIG = LoraConfig(rank=4, alpha=8.0)
ATTENTION_ONLY = LoraConfig(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj"])


def test_a_model_without_adapters_needs_no_peft(monkeypatch):
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.setitem(sys.modules, "peft.tuners.lora", None)  # as where it is not installed
    model = tiny_model(tiny_config(), torch.float32)
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
    base, model = (tiny_model(tiny_config(), torch.bfloat16) for _ in range(2))
    add_adapters(model, CONFIG, seed=0)
    assert torch.equal(response_logprobs(model, batch, 1.0)[0], response_logprobs(base, batch, 1.0)[0])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2  # A and B of q k v o gate up down, in two layers
    assert all(".lora_" in name and p.dtype == torch.bfloat16 for name, p in trained.items())


def test_adapters_depend_on_the_seed_only():
    def drawn(seed, global_seed):
        model = tiny_model(tiny_config(), torch.float32)
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
@pytest.mark.parametrize("config", [CONFIG, ATTENTION_ONLY])
def test_what_is_published_is_the_trained_policy_bit_for_bit(dtype, config, batch):
    model = adapted(dtype, config, Qwen2Config)
    published = frozen_base(model)
    load_frozen(published, published_tensors(model))
    assert not adapted_layers(published)
    assert torch.equal(response_logprobs(published, batch, 1.0)[0], response_logprobs(model, batch, 1.0)[0].detach())


@pytest.mark.parametrize("wrong", ["w_q", "lm_head", "embed_tokens"])
def test_an_unknown_target_is_refused_by_name(wrong):
    model = tiny_model(tiny_config(), torch.float32)
    config = LoraConfig(target_modules=["q_proj", wrong])
    with pytest.raises(ValueError, match=rf"named {wrong}; .* down_proj, gate_proj, k_proj, o_proj, q_proj, "):
        add_adapters(model, config, seed=0)
