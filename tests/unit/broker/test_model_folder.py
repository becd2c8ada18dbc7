"""Checks of the broker on a model in a folder, which it refuses before a trainer tries it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from onbeat.config import JobConfig
from services.broker.admission.models import review_model
from tests.world import job_body

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
    """Return the field and the message of the only complaint; empty texts without one."""
    config = JobConfig.model_validate(job_body(model={"path": str(folder)} | model))
    (complaint_of_folder,) = review_model(config, has_model_folders=True) or [("", "")]
    return complaint_of_folder


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
    ],
)
def test_model_that_does_not_fit_is_refused_by_its_configuration(tmp_path, config, model, field, sentence):
    write_model(tmp_path, "model.embed_tokens.weight", **config)
    wrong_field, message = complaint(tmp_path, **model)
    assert (wrong_field, sentence in message) == (field, True), message
