"""A prompt without a conversation has one beginning of sequence at most, and no end that it did not have."""

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from onbeat.config.templates import TemplateArguments
from services.prompts.prompt_tokenizer import PromptTokenizer
from tests.tiny_models import build_tokenizer

BOS, EOS = "<|im_start|>", "<|im_end|>"


def tokenizer_with(pattern: str) -> Any:
    """Return a tokenizer that puts its special tokens around a text by a pattern such as `BOS $A EOS`."""
    tokenizer = build_tokenizer()
    tokenizer.bos_token, tokenizer.eos_token = BOS, EOS
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, EOS)]
    single = pattern.replace("BOS", BOS).replace("EOS", EOS)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("$A EOS", "2 + 2 =", "2 + 2 ="),
        ("BOS $A EOS", "2 + 2 =", f"{BOS}2 + 2 ="),
        ("BOS $A EOS", f"{BOS}2 + 2 =", f"{BOS}2 + 2 ="),
        ("BOS $A", f"{BOS}{BOS}2 + 2 =", f"{BOS}{BOS}2 + 2 ="),
        ("$A", f"{BOS}{BOS}2 + 2 ={EOS}", f"{BOS}{BOS}2 + 2 ={EOS}"),
        ("BOS $A", f"2 + 2 ={EOS}", f"{BOS}2 + 2 ={EOS}"),
        ("BOS $A EOS", f"{BOS}2 + 2 ={EOS}", f"{BOS}2 + 2 ={EOS}"),
        ("BOS $A EOS", "", BOS),
    ],
)
def test_text_gets_one_beginning_and_no_end(pattern, text, expected):
    tokenizer = tokenizer_with(pattern)
    assert tokenizer.decode(PromptTokenizer(tokenizer).encode_text(text)) == expected


def test_plain_control_tokens_are_no_beginning():
    tokenizer = tokenizer_with("BOS $A EOS")
    token_ids = PromptTokenizer(tokenizer, TemplateArguments(control_tokens="text")).encode_text(f"{BOS}2")
    beginning = tokenizer.convert_tokens_to_ids(BOS)
    assert token_ids[0] == beginning
    assert beginning not in token_ids[1:]
    assert token_ids[-1] != tokenizer.eos_token_id
