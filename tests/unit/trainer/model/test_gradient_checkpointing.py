"""Computing activations again in the backward pass changes memory, and no number."""

import pytest
import torch
from transformers import Qwen3Config

from onbeat.config import LoraConfig
from services.trainer.model.lora import add_adapters
from services.trainer.model.model import enable_gradient_checkpointing, frozen_base, response_logprobs, use_attention
from tests.trainer_fixtures import gradients, tiny_config, tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("has_adapters", [False, True])
def test_logprobs_and_gradients_have_the_same_bits(dtype, is_packed, has_adapters, batch):
    """Dropout, which the configuration asks for, stays off."""
    config = tiny_config(Qwen3Config, head_dim=8, attention_dropout=0.5)
    models = [tiny_model(config, dtype) for _ in range(2)]
    for model in models:
        if has_adapters:
            add_adapters(model, LoraConfig(rank=4), seed=0)
        if not is_packed:
            use_attention(model, "sdpa")
    enable_gradient_checkpointing(models[1])
    expected, computed = (response_logprobs(model, batch, 0.7)[0] for model in models)
    assert torch.equal(computed, expected)
    expected_gradients = gradients(models[0], expected)
    for name, gradient in gradients(models[1], computed).items():
        assert torch.equal(gradient, expected_gradients[name]), name


def test_a_frozen_copy_computes_the_same(batch):
    model = tiny_model(dtype=torch.float32)
    enable_gradient_checkpointing(model)
    frozen = frozen_base(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()  # tied: the copy must not read the original's layers or tables
        model.get_decoder().layers[0].mlp.up_proj.weight.zero_()
        computed = response_logprobs(frozen, batch, 1.0)[0]
    assert torch.equal(computed, response_logprobs(tiny_model(dtype=torch.float32), batch, 1.0)[0])


def test_a_model_without_such_layers_is_refused():
    with pytest.raises(ValueError, match=r"has_gradient_checkpointing: Linear has no layers .* lower"):
        enable_gradient_checkpointing(torch.nn.Linear(2, 2))
