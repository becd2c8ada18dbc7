"""The tokenizer is the file's, whatever class or model type the configuration names."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, Gemma2Config, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from services.prompts.tokenizer import equals_file, load_tokenizer
from services.rollout.prompts import PromptEncoder
from services.trainer.model.bundled import resolve_model
from services.trainer.model.model import model_files
from services.trainer.settings import Settings
from tests.small_tokenizers import KINDS, TEXTS, byte_level, write


@pytest.mark.parametrize("build", KINDS)
@pytest.mark.parametrize("config", [LlamaConfig, Qwen2Config, Qwen3Config, GPT2Config, Gemma2Config])
@pytest.mark.parametrize("tokenizer_class", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_ids_are_those_of_the_file(tmp_path, build: Callable[[], Tokenizer], config, tokenizer_class):
    saved = build()
    source = write(tmp_path / "source", saved, config, tokenizer_class)
    files = model_files(str(source), torch.float32)
    assert files["tokenizer.json"] == (source / "tokenizer.json").read_bytes()
    exported = tmp_path / "exported"
    exported.mkdir()
    for name, content in files.items():
        (exported / name).write_bytes(content)
    for folder in (source, exported):
        tokenizer = load_tokenizer(folder)
        assert tokenizer.eos_token == "<|im_end|>"
        for text in TEXTS:
            token_ids = saved.encode(text, add_special_tokens=False).ids
            assert tokenizer(text, add_special_tokens=False)["input_ids"] == token_ids, text
            assert tokenizer.decode(token_ids) == saved.decode(token_ids)
    assert PromptEncoder.load(exported, None).tokenizer("x 123")["input_ids"] == saved.encode("x 123").ids


def test_class_that_splits_otherwise_is_noticed(tmp_path):
    """Otherwise the test above would say nothing."""
    source = write(tmp_path, byte_level(), LlamaConfig, "LlamaTokenizerFast")
    assert not equals_file(AutoTokenizer.from_pretrained(source), source / "tokenizer.json")
    assert equals_file(load_tokenizer(source), source / "tokenizer.json")


def test_tokenizer_of_another_library_stays_as_it_is(tmp_path):
    source = write(tmp_path, byte_level(), GPT2Config, "GPT2Tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(source)
    (source / "tokenizer.json").unlink()
    tokenizer.save_pretrained(source)
    assert load_tokenizer(source)("x 123")["input_ids"] == tokenizer("x 123")["input_ids"]


def test_what_the_file_adds_around_a_text_is_added(tmp_path):
    saved = byte_level()
    end = saved.token_to_id("<|im_end|>")
    saved.post_processor = processors.TemplateProcessing("<|im_end|> $A", special_tokens=[("<|im_end|>", end)])
    source = write(tmp_path, saved, LlamaConfig, "PreTrainedTokenizerFast")
    assert load_tokenizer(source)("x 123")["input_ids"] == saved.encode("x 123").ids


def test_bundled_model_keeps_its_tokenizer():
    source = resolve_model("bundled:smollm2-135m-instruct", Settings().cache_dir)
    tokenizer, as_before = load_tokenizer(source), AutoTokenizer.from_pretrained(source)
    assert type(tokenizer) is type(as_before)
    for text in TEXTS:
        assert tokenizer(text)["input_ids"] == as_before(text)["input_ids"]
    assert model_files(source, torch.bfloat16)["tokenizer.json"] == Path(source, "tokenizer.json").read_bytes()
