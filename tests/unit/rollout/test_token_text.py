"""Lengths of tokens add up to the text, whatever the tokenizer does with spaces, bytes and special tokens."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from services.rollout import token_text
from services.rollout.token_text import MAX_RUN, TokenText

VOCAB_SIZE = 49152  # tokens of SmolLM2
SPECIAL = range(17)  # special tokens of SmolLM2
TEXTS = {
    "plain": "The answer is 46, since 12 + 34 = 46.\n\n  Done.",
    "emoji": "Hi😀! 👨‍👩‍👧‍👦 and 🇩🇪 and ❤️",
    "cjk": "你好世界、今天天气很好。こんにちは世界 안녕하세요",
    "accents": "na\u0308ive façade Ω≈ç√ مرحبا नमस्ते",
    "replacement characters": "a\ufffdb \ufffd\ufffd",
    "nothing": "",
}


@pytest.fixture(scope="module")
def smollm2_text(smollm2):
    return TokenText(smollm2)


def decode(tokenizer, token_ids):
    """Decode tokens as engines do."""
    return tokenizer.decode(token_ids, skip_special_tokens=True)


def parts(lengths, text):
    return [text[start:end] for start, end in pairwise(accumulate(lengths, initial=0))]


# ---- the bundled model's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_each_token_has_what_it_adds_to_the_text(smollm2, smollm2_text, text):
    token_ids = [*smollm2(text)["input_ids"], smollm2.eos_token_id]
    lengths = smollm2_text.lengths(token_ids, text)
    assert (len(lengths), sum(lengths)) == (len(token_ids), len(text))
    assert lengths[-1] == 0  # the end of sequence gives no text
    for token_id, part in zip(token_ids[:-1], parts(lengths, text), strict=False):
        whole = smollm2.decode([token_id])
        if "\ufffd" not in whole:
            assert part == whole
    for end, before in zip(accumulate(lengths), range(1, len(token_ids)), strict=False):
        given = decode(smollm2, token_ids[:before])
        if not given.endswith("\ufffd"):
            assert text[:end] == given


def test_character_belongs_to_the_last_of_its_tokens(smollm2, smollm2_text):
    token_ids = smollm2("Hi😀!")["input_ids"]
    assert smollm2_text.lengths(token_ids, "Hi😀!") == [2, *[0] * (len(token_ids) - 3), 1, 1]


def test_text_may_end_within_a_character_or_before_last_tokens(smollm2, smollm2_text):
    """An engine leaves out the character that is not complete, or replaces it; another one cuts at a stop string."""
    token_ids = smollm2("so 😀")["input_ids"][:-1]
    assert sum(smollm2_text.lengths(token_ids, "so ")) == 3
    assert sum(smollm2_text.lengths(token_ids, "so \ufffd")) == 4
    token_ids = smollm2("one two three")["input_ids"]
    assert parts(smollm2_text.lengths(token_ids, "one t"), "one t") == ["one", " t", ""]


def test_text_of_other_tokens_is_not_known(smollm2, smollm2_text):
    token_ids = smollm2("one two three")["input_ids"]
    for text in ("one two four", "one  two three", "One two three", "one two three four", "x" * 100):
        assert smollm2_text.lengths(token_ids, text) == []
    assert smollm2_text.lengths([5, -1], "x") == smollm2_text.lengths([2**40], "x") == []
    assert smollm2_text.lengths([], "") == []


ordinary = st.integers(0, VOCAB_SIZE - 1)


@pytest.fixture(scope="module")
def byte_ids(smollm2):
    """Tokens that are no whole characters."""
    return [token_id for token_id in range(VOCAB_SIZE) if "\ufffd" in smollm2.decode([token_id])]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_lengths_of_any_tokens_are_known_and_add_up(smollm2, smollm2_text, byte_ids, data):
    token_id = st.one_of(ordinary, st.sampled_from(byte_ids), st.sampled_from(SPECIAL))
    token_ids = data.draw(st.lists(token_id, min_size=1, max_size=80))
    text = decode(smollm2, token_ids)
    lengths = smollm2_text.lengths(token_ids, text)
    assert (len(lengths), sum(lengths)) == (len(token_ids), len(text))
    assert min(lengths) >= 0


@settings(max_examples=200, deadline=None)
@given(token_ids=st.lists(ordinary, max_size=12), text=st.text(max_size=12))
def test_lengths_of_any_text_add_up_or_are_not_known(smollm2_text, token_ids, text):
    lengths = smollm2_text.lengths(token_ids, text)
    assert not lengths or (len(lengths), sum(lengths)) == (len(token_ids), len(text))


def test_effort_is_bounded_where_nothing_fits(smollm2, byte_ids, calls_of):
    token_ids = (byte_ids * 20)[:4000]
    runs = calls_of(token_text, "num_common")
    assert TokenText(smollm2).lengths(token_ids, "nothing of this") == []
    assert len(runs) <= 3 * MAX_RUN


# ---- tokenizers of other kinds -------------------------------------------------------------------------------------


def metaspace_tokenizer():
    """Make a tokenizer like that of Llama 2: a space begins the next word, unknown characters are bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "t", "h", "e", "c"]
    words += ["\u2581t", "\u2581th", "\u2581the", "\u2581c", "\u2581ca", "\u2581cat", "!"]
    merges = [
        ("\u2581", "t"),
        ("\u2581t", "h"),
        ("\u2581th", "e"),
        ("\u2581", "c"),
        ("\u2581c", "a"),
        ("\u2581ca", "t"),
    ]
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.mark.parametrize("is_space_kept", [False, True], ids=["as decoded", "as vLLM does after a prompt"])
def test_spaces_that_the_decoder_leaves_out_at_the_start(is_space_kept):
    tokenizer = metaspace_tokenizer()
    token_ids = [*tokenizer("the cat ☃!", add_special_tokens=False)["input_ids"], 2]
    text = " " * is_space_kept + decode(tokenizer, token_ids)
    assert text.strip() == "the cat ☃!"
    token_texts = parts(TokenText(tokenizer).lengths(token_ids, text), text)
    assert token_texts == [" " * is_space_kept + "the", " cat", " ", "", "", "☃", "!", ""]
