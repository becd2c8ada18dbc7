"""Tiny random models in HF layout, with a tokenizer, written without a hub: what tests run real engines on."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

VOCAB_SIZE = 512
MAX_MODEL_LEN = 512
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_TOKEN = "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tied_model(model_dir: Path) -> Path:
    """Write a model whose output head is its embedding."""
    return _write_model(model_dir, LlamaConfig, tie_word_embeddings=True)


def write_untied_model(model_dir: Path) -> Path:
    """Write a model with a separate output head, and with attention biases, which vLLM reloads differently."""
    return _write_model(model_dir, LlamaConfig, tie_word_embeddings=False, attention_bias=True)


def write_qwen3_moe_model(model_dir: Path, has_hub_names: bool = False) -> Path:
    """Write a mixture of experts, whose routers are beside them. `has_hub_names`: as on the hub, not as published."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return _write_model(model_dir, Qwen3MoeConfig, has_hub_names, tie_word_embeddings=False, **experts)


def write_mixtral_model(model_dir: Path, has_hub_names: bool = False) -> Path:
    """Another mixture of experts, whose size (80) a kernel may have to pad."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 80}
    return _write_model(model_dir, MixtralConfig, has_hub_names, tie_word_embeddings=False, **experts)


def write_perturbed_weights(model_dir: Path, weights_file: Path, seed: int) -> Path:
    """Write the weights of `model_dir` plus normal noise, as one safetensors file."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(model_dir / "model.safetensors")
    perturbed = {
        name: (weight.float() + 0.02 * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        for name, weight in weights.items()
    }
    weights_file.parent.mkdir(parents=True, exist_ok=True)
    save_file(perturbed, weights_file, metadata={"format": "pt"})
    return weights_file


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level without merges: bytes are 0-255, then the special tokens. Any text encodes, one token per byte."""
    vocab = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token=EOS_TOKEN,
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_MODEL_LEN,
    )


def _write_model(
    model_dir: Path, config_class: type[PreTrainedConfig], has_hub_names: bool = False, **options: Any
) -> Path:
    tokenizer = build_tokenizer()
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the least that vLLM has attention for on the CPU
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.15,  # wide, so that logits differ visibly between tokens and between models
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_class(**(sizes | options))).to(torch.bfloat16)
    # Sampling defaults that an engine must not take over from the model.
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, do_sample=True, top_k=2, top_p=0.5)
    model.save_pretrained(model_dir)
    if not has_hub_names:
        # Under the names that the trainer publishes: those of the hub hold each expert by itself.
        published = {name: parameter.detach() for name, parameter in model.named_parameters()}
        save_file(published, model_dir / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(model_dir)
    return model_dir
