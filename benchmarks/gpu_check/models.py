"""Models with random weights, made from a configuration: no hub, no file."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from services.trainer.model.model import (
    PACKED_ATTENTION,
    Passes,
    enable_gradient_checkpointing,
    register_attention,
    set_up,
)
from tests.tiny_models import build_tokenizer

SIZES = {  # Qwen2.5's hidden, intermediate, layers, query heads, key/value heads, vocabulary, tied embeddings
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    # Not of Qwen2.5.
    "0.1B": (768, 3072, 12, 12, 4, 512, True),
    "tiny": (64, 96, 2, 4, 2, 50_000, True),
    "tiny, few tokens": (64, 96, 2, 4, 2, 512, True),
}


def random_config(size: str) -> Qwen2Config:
    hidden, intermediate, layers, heads, kv_heads, vocabulary, is_tied = SIZES[size]
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=is_tied,
    )


def random_model(size: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a decoder that attends by packed layouts, as the trainer has it."""
    register_attention()
    with device:
        model = AutoModelForCausalLM.from_config(random_config(size), dtype=dtype, attn_implementation=PACKED_ATTENTION)
    set_up(model, Passes(), device)
    enable_gradient_checkpointing(model)
    return model


def write_model(folder: Path, size: str) -> Path:
    """Write a model in Hugging Face layout with the tokenizer of the tests, one token per byte."""
    tokenizer, config = build_tokenizer(), random_config(size)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.initializer_range = 0.05  # wide enough for logits that differ visibly between tokens
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
