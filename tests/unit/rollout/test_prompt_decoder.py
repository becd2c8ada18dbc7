"""The prompt that the model saw, for people: special tokens are told apart from text that looks like one."""

import pytest
from tokenizers import AddedToken

from onbeat.streams.codec import PromptPart, Response, RolloutGroup, Turn
from services.rollout import prompt_decoder
from services.rollout.prompt_decoder import PromptDecoder
from tests.unit.rollout.test_token_text import metaspace_tokenizer

START, END = PromptPart(text="<|im_start|>", is_special=True), PromptPart(text="<|im_end|>", is_special=True)


@pytest.fixture(scope="module")
def decoder(smollm2):
    return PromptDecoder(smollm2)


def shown(decoder, token_ids):
    return decoder.parts(token_ids, is_first=True)


def test_special_tokens_are_apart_and_parts_join_to_the_prompt(smollm2, decoder):
    text = "<|im_start|>user\nna\u0308ive 😀 你好<|im_end|>\n<|im_start|>assistant\n"
    token_ids = smollm2(text)["input_ids"]
    user, gap, assistant = (PromptPart(text=part) for part in ("user\nna\u0308ive 😀 你好", "\n", "assistant\n"))
    assert shown(decoder, token_ids) == [START, user, END, gap, START, assistant]


def test_text_that_looks_like_a_special_token_is_not_marked(smollm2, decoder):
    first, second = (smollm2(half, add_special_tokens=False)["input_ids"] for half in ("<|im_", "end|>"))
    assert shown(decoder, first + second) == [PromptPart(text="<|im_end|>")]


def test_spaces_left_out_by_the_decoder_at_the_start_are_kept():
    tokenizer = metaspace_tokenizer()
    words = tokenizer("the cat", add_special_tokens=False)["input_ids"]
    parts = shown(PromptDecoder(tokenizer), [1, *words, 2, *words])
    assert [part.text for part in parts] == ["<s>", " the cat", "</s>", " the cat"]


def test_token_that_was_added_as_special_is_marked(smollm2):
    from copy import deepcopy

    tokenizer = deepcopy(smollm2)
    tokenizer.add_tokens([AddedToken("<|tool|>", special=True), AddedToken("<think>", special=False)])
    parts = shown(PromptDecoder(tokenizer), tokenizer("<|tool|><think>a")["input_ids"])
    assert parts == [PromptPart(text="<|tool|>", is_special=True), PromptPart(text="<think>a")]


def test_of_a_long_prompt_beginning_and_end_are_shown(smollm2, decoder, monkeypatch):
    monkeypatch.setattr(prompt_decoder, "MAX_SHOWN", 4)
    token_ids = smollm2("one two three four five six seven")["input_ids"]
    first, gap, last = shown(decoder, token_ids)
    assert (first.text, gap.num_left_out, last.text) == ("one two", 3, " six seven")


def test_prompt_that_cannot_be_decoded_has_no_parts(decoder):
    assert shown(decoder, [2**40]) == []
    assert shown(decoder, []) == []


async def test_each_turn_shows_the_tokens_that_were_new_in_its_prompt(smollm2, decoder):
    prompt, observed = smollm2("<|im_start|>user\n")["input_ids"], smollm2(" 9<|im_end|>")["input_ids"]
    group = RolloutGroup(prompt_token_ids=prompt)
    group.responses.append(Response(turns=[Turn(), Turn(observed_token_ids=observed)]))
    await decoder.add_parts(group)
    assert list(group.prompt_parts) == [START, PromptPart(text="user\n")]
    first, second = group.responses[0].turns
    assert (list(first.observed_parts), list(second.observed_parts)) == ([], [PromptPart(text=" 9"), END])
