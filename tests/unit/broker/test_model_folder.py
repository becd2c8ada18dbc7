"""Models in folders, of which the broker refuses what a trainer could not use."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from onbeat.config import JobConfig
from services.broker.admission.models import review_model
from tests.world import job_body

DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
LINEAR = {"type": "linear", "factor": 4.0}  # as older configurations name it
SHORT = {"max_position_embeddings": 64}
LONG_ROPE = {"rope_type": "longrope", "original_max_position_embeddings": 512}


def as_safetensors(header: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header


def write_model(folder: Path, tensor: str = "w", **config: Any) -> None:
    """Write a whole model, with one tensor of two rows."""
    header = json.dumps({tensor: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(as_safetensors(header) + bytes(8))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))


def complaint(folder: Path, **model: Any) -> tuple[str, str]:
    """Return the field and the message of the only complaint; empty without one."""
    config = JobConfig.model_validate(job_body(model={"path": str(folder)} | model))
    (only_complaint,) = review_model(config, has_model_folders=True) or [("", "")]
    return only_complaint


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("config.json", None, "has no readable config.json"),
        ("config.json", b" " * ((16 << 20) + 1), "has no readable config.json"),
        ("config.json", b"{", "config.json is not valid JSON"),
        ("config.json", b"[]", "config.json names no model_type"),
        ("config.json", b"{}", "config.json names no model_type"),
        ("tokenizer.json", None, "has no tokenizer; save it into the same folder"),
        ("model.safetensors", None, "has no weights; save the model as safetensors"),
        ("model.safetensors", b"", "model.safetensors is not whole: it ends after 0 bytes"),
        ("model.safetensors", bytes([80, *bytes(19)]), "it ends after 20 bytes, within its header"),
        ("model.safetensors", (8).to_bytes(8, "little") + b"no JSON.", "its header is no header of safetensors"),
        (
            "model.safetensors",
            as_safetensors(b'{"wte.weight": {"shape": [1e999], "data_offsets": [0, 0]}}'),
            "its header is no header of safetensors",
        ),
        (
            "model.safetensors",
            (63).to_bytes(8, "little") + b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}  ' + bytes(5),
            "3 bytes are missing at its end",
        ),
    ],
)
def test_model_that_is_not_whole_is_refused_by_what_is_missing(tmp_path, file, content, sentence):
    write_model(tmp_path)
    assert complaint(tmp_path) == ("", "")
    (tmp_path / file).unlink() if content is None else (tmp_path / file).write_bytes(content)
    field, message = complaint(tmp_path)
    assert (field, sentence in message) == ("model.path", True), message


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_weights_that_cannot_be_read_are_named(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("/proc/self/mem")  # a file, of which no first byte can be read
    field, message = complaint(tmp_path)
    assert (field, "model.safetensors cannot be read: Input/output error; " in message) == ("model.path", True), message


def test_pickled_weights_are_refused_by_name(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "has pickled weights (pytorch_model.bin)" in (complaint(tmp_path))[1]


@pytest.mark.parametrize(
    ("config", "model", "field", "sentence"),
    [
        ({"architectures": ["BertForMaskedLM"]}, {}, "model.path", "is a BertForMaskedLM, which generates no text"),
        ({"architectures": ["LlamaForSequenceClassification"]}, {}, "model.path", "which generates no text"),
        ({"architectures": ["LlamaForCausalLM"]}, {}, "", ""),
        ({"vocab_size": 3}, {}, "model.path", "vocab_size = 3, but the embedding of the weights has 2 tokens"),
        ({"text_config": {"vocab_size": 3}}, {}, "model.path", "has vocab_size = 3, but the embedding"),
        ({"vocab_size": 2}, {}, "", ""),
        ({"text_config": {"max_position_embeddings": 9}}, {}, "", ""),  # responses have 8 tokens
        ({"text_config": {"max_position_embeddings": 8}}, {}, "rollout.max_response_tokens", "context of 8 tokens"),
        ({"n_positions": 8}, {}, "rollout.max_response_tokens", "context of 8 tokens"),  # GPT-2's name for it
        ({"rope_parameters": LONG_ROPE}, {}, "model.max_context_tokens", "set it to 512 or less"),
        ({"rope_parameters": LONG_ROPE}, {"max_context_tokens": 513}, "model.max_context_tokens", "512 or less"),
        ({"rope_parameters": LONG_ROPE}, {"max_context_tokens": 512}, "", ""),
        (
            {"rope_scaling": DYNAMIC, **SHORT},
            {},
            "model.max_context_tokens",
            "(dynamic) beyond 64 tokens; set it to 64",
        ),
        ({"rope_scaling": DYNAMIC, **SHORT}, {"max_context_tokens": 64}, "", ""),
        ({"rope_scaling": DYNAMIC, **SHORT}, {"max_context_tokens": 257}, "model.max_context_tokens", "supports 256 t"),
        ({"rope_scaling": LINEAR, **SHORT}, {"max_context_tokens": 256}, "", ""),
        ({"rope_scaling": LINEAR, **SHORT}, {"max_context_tokens": 257}, "model.max_context_tokens", "supports 256 t"),
    ],
)
def test_model_that_does_not_fit_is_refused_by_its_configuration(tmp_path, config, model, field, sentence):
    write_model(tmp_path, "model.embed_tokens.weight", **config)
    complained_field, message = complaint(tmp_path, **model)
    assert (complained_field, sentence in message) == (field, True), message


# ---- weights, their index, adapters, quantised ones --------------------------------------------------------------


def tensor_file(*names: str, dtype: str = "F32") -> bytes:
    entry = {"dtype": dtype, "shape": [2], "data_offsets": [0, 8]}
    return as_safetensors(json.dumps(dict.fromkeys(names, entry)).encode()) + bytes(8)


def write_shards(folder: Path, weight_map: object) -> None:
    write_model(folder)
    (folder / "model.safetensors").unlink()
    (folder / "model-1.safetensors").write_bytes(tensor_file("a", "b"))
    (folder / "model-2.safetensors").write_bytes(tensor_file("c"))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


WHOLE = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}


def test_whole_shards_are_accepted_beside_files_of_others(tmp_path):
    write_shards(tmp_path, WHOLE)
    (tmp_path / "consolidated.safetensors").write_bytes(tensor_file("z"))  # another layout, which the index leaves out
    assert complaint(tmp_path) == ("", "")


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        (WHOLE | {"d": "model-3.safetensors"}, "names model-3.safetensors, which is not there"),
        (WHOLE | {"d": "model-2.safetensors"}, "says that model-2.safetensors holds d, and it does not"),
        ({}, "is no index of safetensors files"),
        ([], "is no index of safetensors files"),
        ({"a": 3}, "is no index of safetensors files"),
        ({"a": "../other/model.safetensors"}, "is no index of safetensors files"),
        (WHOLE | {"a": "model.safetensors"}, "names model.safetensors, which is not there"),
    ],
)
def test_index_that_does_not_fit_its_files_is_refused(tmp_path, weight_map, sentence):
    write_shards(tmp_path, weight_map)
    field, message = complaint(tmp_path)
    assert (field, sentence in message) == ("model.path", True), message


def test_index_that_is_cut_off_is_named(tmp_path):
    write_shards(tmp_path, WHOLE)
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(path.read_bytes()[:40])
    assert f"{path} is no index of safetensors files" in complaint(tmp_path)[1]


def test_shards_without_an_index_are_refused(tmp_path):
    write_shards(tmp_path, WHOLE)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "that says what is in model-1.safetensors and others" in complaint(tmp_path)[1]


def test_old_single_file_beside_shards_is_refused(tmp_path):
    write_shards(tmp_path, WHOLE)
    (tmp_path / "model.safetensors").write_bytes(tensor_file("a"))
    assert "has both model.safetensors and an index of other files" in complaint(tmp_path)[1]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "F8_E8M0"])
def test_weights_of_eight_bits_are_not_taken_for_numbers(tmp_path, dtype):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(tensor_file("q.weight", dtype=dtype))
    assert "has weights of 8 bits or less (q.weight)" in complaint(tmp_path)[1]


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16", "I64", "BOOL"])
def test_plain_numbers_and_counters_are_accepted(tmp_path, dtype):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(tensor_file("w", dtype=dtype))
    assert complaint(tmp_path) == ("", "")


@pytest.mark.parametrize("method", ["fp8", "gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_quantised_model_is_refused_in_one_sentence(tmp_path, method, is_nested):
    quantization = {"quantization_config": {"quant_method": method}}
    write_model(tmp_path, **({"text_config": quantization} if is_nested else quantization))
    assert f"is quantised ({method}), and such weights cannot be trained" in complaint(tmp_path)[1]


def test_adapter_is_named_as_one_alone_and_beside_weights(tmp_path):
    write_model(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    assert "has an adapter (adapter_config.json) beside the weights" in complaint(tmp_path)[1]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).unlink()
    assert "is an adapter for org/base, and no model" in complaint(tmp_path)[1]
    (tmp_path / "adapter_config.json").write_text("{")
    assert "is an adapter for a model that it does not name" in complaint(tmp_path)[1]
