"""Computing activations again in the backward pass changes memory, and no number."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from onbeat.config import LoraConfig
from services.trainer.model.lora import add_adapters
from services.trainer.model.model import enable_gradient_checkpointing, frozen_base, response_logprobs, use_attention
from tests.trainer_fixtures import gradients, tiny_config, tiny_model


def assert_same_bits(plain, checkpointed, batch):
    expected, found = (response_logprobs(model, batch, 0.7)[0] for model in (plain, checkpointed))
    assert torch.equal(found, expected)
    expected_gradients = gradients(plain, expected)
    for name, gradient in gradients(checkpointed, found).items():
        assert torch.equal(gradient, expected_gradients[name]), name
    assert not checkpointed.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_logprobs_and_gradients_have_the_same_bits(dtype, is_packed, has_adapters, batch):
    models = [tiny_model(tiny_config(Qwen3Config, head_dim=8), dtype) for _ in range(2)]
    for model in models:
        if has_adapters:
            add_adapters(model, LoraConfig(rank=4), seed=0)
        if not is_packed:
            use_attention(model, "sdpa")
    enable_gradient_checkpointing(models[1])
    assert_same_bits(*models, batch)


def test_dropout_stays_off(batch):
    models = [tiny_model(tiny_config(attention_dropout=0.5), torch.float32) for _ in range(2)]
    enable_gradient_checkpointing(models[1])
    assert_same_bits(*models, batch)


def saved_bytes(model, batch):
    """What autograd holds between forward and backward, parameters aside."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held = {}

    def hold(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        response_logprobs(model, batch, 1.0)
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.parametrize("has_adapters", [False, True])
def test_less_is_kept_for_the_backward_pass(has_adapters, batch):
    plain, checkpointed = (tiny_model(tiny_config(LlamaConfig, num_hidden_layers=6)) for _ in range(2))
    if has_adapters:
        add_adapters(plain, LoraConfig(rank=4), seed=0)
        add_adapters(checkpointed, LoraConfig(rank=4), seed=0)
    enable_gradient_checkpointing(checkpointed)
    assert saved_bytes(checkpointed, batch) < 0.25 * saved_bytes(plain, batch)


def test_a_frozen_copy_computes_the_same(batch):
    model = tiny_model(tiny_config(), torch.float32)
    enable_gradient_checkpointing(model)
    frozen = frozen_base(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # tied: the copy must not read the original's layers or tables
        model.get_decoder().layers[0].mlp.up_proj.weight.zero_()
        found = response_logprobs(frozen, batch, 1.0)[0]
    assert torch.equal(found, response_logprobs(tiny_model(tiny_config(), torch.float32), batch, 1.0)[0])


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match=r"has_gradient_checkpointing: Linear has no layers .* lower"):
        enable_gradient_checkpointing(torch.nn.Linear(2, 2))
