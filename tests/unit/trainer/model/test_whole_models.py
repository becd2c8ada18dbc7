"""Checkpoints that are not what they say: the load ends with a name, and nothing is made up."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, Qwen2Config

from services.trainer.model.model import load_config, load_model
from services.trainer.model.whole import check_source, left_out
from tests.trainer_fixtures import tiny_config, tiny_model

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
QUERY = "model.layers.0.self_attn.q_proj.weight"


def model_folder(folder: Path, config=None, change: Callable[[Tensors], object] = lambda tensors: None) -> Path:
    tiny_model(config or tiny_config(), torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path):
    check_source(str(folder), load_config(str(folder)))
    return load_model(str(folder), torch.float32, CPU)


def drop(*parts: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if any(part in name for part in parts)]


def rename(old: str, new: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.update({name.replace(old, new, 1): tensors.pop(name)}) for name in list(tensors)]


@pytest.mark.parametrize(
    ("config", "change", "sentence"),
    [
        (tiny_config(), drop("layers.1.mlp"), "lacks 3 tensors (model.layers.1.mlp.down_proj.weight, "),
        (tiny_config(), drop("embed_tokens"), "lacks 2 tensors (lm_head.weight, model.embed_tokens.weight)"),
        (tiny_config(Qwen2Config), drop("0.self_attn.q_proj.bias"), "(model.layers.0.self_attn.q_proj.bias)"),
        (tiny_config(**{"tie_word_embeddings": False}), drop("lm_head"), "lacks 1 tensor (lm_head.weight)"),
        (tiny_config(), rename("model.", "_orig_mod.model."), "20 tensors (_orig_mod.model.embed_tokens.weight, "),
        (tiny_config(), rename("q_proj", "query"), "2 tensors (model.layers.0.self_attn.query.weight, "),
        (tiny_config(), rename("layers.1", "layers.2"), "lacks 9 tensors (model.layers.1.input_layernorm.weight, "),
        (
            tiny_config(),
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}),
            "has model.norm.weight of shape (7,) where config.json means (32,)",
        ),
        (tiny_config(), lambda tensors: tensors.update({"v_head.weight": torch.zeros(1, 32)}), "1 tensor (v_head.w"),
        (tiny_config(), lambda tensors: tensors.update({QUERY + "_scale_inv": torch.ones(1)}), "does not use"),
        (
            tiny_config(MixtralConfig, num_local_experts=2),
            drop("1.block_sparse_moe.experts.1.w2"),
            "has model.layers.1.mlp.experts.down_proj of shape (1, 32, 48) where config.json means (2, 32, 48)",
        ),
    ],
)
def test_missing_and_unused_tensors_end_the_load(tmp_path, config, change, sentence):
    load(model_folder(tmp_path / "whole", config))
    spoiled = model_folder(tmp_path / "spoiled", config, change)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        load(spoiled)


def test_other_names_that_transformers_knows_are_read(tmp_path):
    wanted = load(model_folder(tmp_path / "whole")).state_dict()
    base = load(model_folder(tmp_path / "base", change=rename("model.", ""))).state_dict()
    assert wanted.keys() == base.keys()
    assert all(torch.equal(base[name], tensor) for name, tensor in wanted.items())


def test_tied_head_that_equals_the_embedding_is_read(tmp_path):
    copy = lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})  # noqa: E731
    model = load(model_folder(tmp_path, change=copy))
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_other_head_than_a_tied_one_ends_the_load(tmp_path):
    other = lambda tensors: tensors.update({"lm_head.weight": torch.zeros(61, 32)})  # noqa: E731
    with pytest.raises(ValueError, match="tie_word_embeddings = true, but its files have an output head that differs"):
        load(model_folder(tmp_path, change=other))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_weights_of_eight_bits_are_refused(tmp_path, dtype):
    folder = model_folder(tmp_path, change=lambda tensors: tensors.update({QUERY: tensors[QUERY].to(dtype)}))
    with pytest.raises(ValueError, match=f"need their scales: 1 tensor .{QUERY}"):
        load(folder)


def test_quantised_model_is_refused(tmp_path):
    path = model_folder(tmp_path) / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))
    with pytest.raises(ValueError, match=r"is quantised \(fp8\), and such weights cannot be trained"):
        load(tmp_path)


def test_adapter_beside_the_weights_is_refused(tmp_path):
    (model_folder(tmp_path) / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has an adapter .* beside its weights; merge it"):
        load(tmp_path)


def test_tensors_that_the_class_expects_are_counted(tmp_path):
    later = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "mtp.fc.weight": torch.ones(2, 2)}
    folder = model_folder(tmp_path, change=lambda tensors: tensors.update(later))
    model = tiny_model(dtype=torch.bfloat16)
    model._keys_to_ignore_on_load_unexpected = {r"^mtp.*"}  # as Qwen3-Next's class has it
    assert left_out(str(folder), model) == ["mtp.fc.weight"]
    model._keys_to_ignore_on_load_unexpected.add(r"model\.layers\.1\.")  # as DeepSeek-V3's class names a layer
    assert left_out(str(folder), model) == ["mtp.fc.weight"]
