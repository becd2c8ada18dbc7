"""Models that are opened and filled from their files, against the same ones loaded by transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, Gemma2Config, MixtralConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from services.trainer.model.model import DTYPES, Passes, load_model, model_files
from services.trainer.model.sharding import fill
from services.trainer.model.stored_model import open_model
from tests.trainer_fixtures import tiny_config, tiny_model

CPU = torch.device("cpu")
CONFIGS = {
    "tied": tiny_config(),
    "untied": tiny_config(tie_word_embeddings=False),
    "biases": tiny_config(Qwen2Config),
    "norms of queries": tiny_config(Qwen3Config, head_dim=8),
    "soft caps": tiny_config(Gemma2Config, head_dim=8),
}


def write(folder, config, max_shard_size="50GB"):
    tiny_model(config, torch.bfloat16).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("name", CONFIGS)
def test_opened_model_is_filled_with_the_bits_of_the_loaded_one(name, dtype, tmp_path):
    source = str(write(tmp_path, CONFIGS[name], "10KB"))
    assert (tmp_path / "model.safetensors.index.json").exists()
    model, stored = open_model(source, dtype, CPU, Passes())
    assert sum(parameter.numel() for parameter in model.parameters()) == 0
    fill(model.requires_grad_(False), "", stored)
    loaded = load_model(source, dtype, CPU)
    assert model.state_dict().keys() == loaded.state_dict().keys()
    for kind in ("named_parameters", "named_buffers"):
        filled, expected = (dict(getattr(side, kind)()) for side in (model, loaded))
        assert list(filled) == list(expected)
        for name, tensor in expected.items():
            assert filled[name].dtype == tensor.dtype
            assert torch.equal(filled[name], tensor), name
    is_tied = loaded.config.tie_word_embeddings
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == is_tied
    assert (model.training, model.passes, model.config.use_cache) == (False, Passes(), False)


def rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def without_prefix(tensors):
    for name in list(tensors):
        tensors[name.removeprefix("model.")] = tensors.pop(name)


def convert(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def quantize(folder):
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda folder: rewrite(folder, without_prefix), id="the base model's names"),
        pytest.param(
            lambda folder: rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(61, 32)})),
            id="a head beside the tied one",
        ),
        pytest.param(
            lambda folder: rewrite(folder, lambda tensors: tensors.pop("model.norm.weight")), id="a missing tensor"
        ),
        pytest.param(
            lambda folder: rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)})),
            id="another shape",
        ),
        pytest.param(convert, id="no safetensors"),
        pytest.param(quantize, id="quantized"),
        pytest.param(lambda folder: (folder / "model.safetensors").write_bytes(b"torn"), id="a torn file"),
        pytest.param(lambda folder: (folder / "config.json").unlink(), id="no config"),
    ],
)
def test_other_than_own_tensors_are_left_to_transformers(change, tmp_path):
    source = str(write(tmp_path, tiny_config()))
    assert open_model(source, torch.bfloat16, CPU, Passes()) is not None
    change(tmp_path)
    assert open_model(source, torch.bfloat16, CPU, Passes()) is None


def test_experts_that_transformers_merges_are_left_to_it(tmp_path):
    source = str(write(tmp_path, tiny_config(MixtralConfig, num_local_experts=2)))
    assert open_model(source, torch.bfloat16, CPU, Passes()) is None


def write_tokenizer(folder):
    words = Tokenizer(WordLevel({"one": 0}, unk_token="one"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def test_generation_config_of_a_hub_model_goes_along_unchanged(tmp_path, monkeypatch):
    """It may be the only file that names the end of a turn; and transformers refuses to save this one."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    write(snapshot, CONFIGS["norms of queries"])
    write_tokenizer(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "generation_config.json").unlink(missing_ok=True)
    assert "generation_config.json" not in model_files("org/name", torch.bfloat16)
    generation = b'{"eos_token_id": [1, 5], "temperature": 0.9}'
    (snapshot / "generation_config.json").write_bytes(generation)
    for source in ("org/name", str(snapshot)):
        assert model_files(source, torch.bfloat16)["generation_config.json"] == generation


def test_exported_config_names_the_dtype_of_the_weights(tmp_path):
    write(tmp_path / "source", CONFIGS["norms of queries"])
    write_tokenizer(tmp_path / "source")
    for dtype in DTYPES.values():
        files = model_files(str(tmp_path / "source"), dtype)
        (tmp_path / "config.json").write_bytes(files["config.json"])
        assert AutoConfig.from_pretrained(tmp_path).dtype == dtype
