"""The longest context of a model, against what vLLM's own configuration says of the same files."""

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, Qwen2Config

from onbeat.contracts.model_config import context_tokens
from tests.trainer_fixtures import tiny_config

SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "a factor with a fraction": {"rope_type": "linear", "factor": 1.3},
}


def vllm_limit(folder: Path) -> int:
    from vllm.config import ModelConfig

    return int(ModelConfig(model=str(folder), skip_tokenizer_init=True).max_model_len)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("config_class", [LlamaConfig, Qwen2Config])
def test_limit_is_the_one_that_vllm_reads(tmp_path, config_class, scaling):
    rope = SCALINGS[scaling]
    options = {"rope_parameters": rope | {"rope_theta": 1e4}} if rope else {}
    config = tiny_config(config_class, max_position_embeddings=64, **options)
    config.architectures = [config_class.__name__.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    limit = context_tokens(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    assert limit == vllm_limit(tmp_path)


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": 2}}, 128),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear", "factor": None}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4}}, 64),
        ({"text_config": {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "linear", "factor": 2}}}, 128),
        (
            {
                "model_type": "gemma3",
                "max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "linear", "factor": 8},
            },
            64,
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "linear", "factor": 2.0},
                },
            },
            128,
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, None),
    ],
)
def test_limit_of_scaled_embeddings(model, limit):
    assert context_tokens(model) == limit
