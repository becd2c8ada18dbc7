"""The end of a response, by its tokens: stop strings, stop tokens, and the token that ends a turn of the template."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from onbeat.config import JobConfig
from onbeat.engines import GeneratedResponse, Sampling, VersionSpan
from onbeat.streams.codec import PromptTask
from services.rollout.end_of_turn import add_end_of_turn
from services.rollout.engines.stops import Ending, cut_at_stop, first_stop, read_end_ids
from services.rollout.prompts import PromptEncoder
from services.rollout.sampling import check_taken, ended, sampling_of
from services.rollout.token_text import TokenText
from services.trainer import stop_check
from tests.tiny_models import CHAT_TEMPLATE, build_tokenizer
from tests.world import job_body

PIECES = ["4", ".\n", "\nQ", ": 5", "<end>", "Q:"]


def decode(token_ids: list[int]) -> str:
    return "".join(PIECES[token_id] for token_id in token_ids if token_id != 4)


def end_of(token_ids: list[int], **sampling) -> tuple[int, str | None, str]:
    """Return how many tokens belong to the response, its finish reason and its text."""
    ending = Ending(decode, Sampling(**({"max_response_tokens": 6, "temperature": 1.0, "seed": 0} | sampling)), {4})
    for token_id in token_ids:
        if ending.push(token_id):
            break
    return len(ending.token_ids), ending.finish_reason, ending.text


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, (5, "stop", "4.\n\nQ: 5")),
        ({"max_response_tokens": 3}, (3, "length", "4.\n\nQ")),
        ({"stop": ("\n\nQ:",)}, (4, "stop", "4.")),  # the last token goes on behind the stop
        ({"stop": ("\n\nQ",)}, (3, "stop", "4.")),
        ({"stop": ("never", "\nQ", ".")}, (2, "stop", "4")),
        ({"stop": ("Q", "\nQ")}, (3, "stop", "4.\n")),  # both end together: the longer one
        ({"stop_token_ids": (2,)}, (3, "stop", "4.\n")),
        ({"stop": ("4",), "min_tokens": 1}, (5, "stop", "4.\n\nQ: 5")),
        ({"stop": ("\nQ:",), "min_tokens": 3}, (4, "stop", "4.\n")),
    ],
)
def test_response_ends_with_the_token_that_completes_a_stop(sampling: dict, expected: tuple) -> None:
    assert end_of([0, 1, 2, 3, 4], **sampling) == expected


def test_stop_that_begins_in_an_unfinished_character_is_seen() -> None:
    texts = {1: "é?"[:1], 2: "é\ufffd", 3: "é…END"}
    ending = Ending(lambda token_ids: texts[len(token_ids)], Sampling(9, 1.0, 0, stop=("…E",)))
    assert [ending.push(token_id) for token_id in (1, 2, 3)] == [False, False, True]
    assert ending.text == "é"


def test_first_complete_stop_wins_wherever_the_search_begins() -> None:
    assert first_stop("a END b", ["END", " E"]) == 1
    assert [first_stop("xENDx", ["END"], num_searched) for num_searched in (0, 3, 4)] == [1, 1, None]


def test_cut_text_is_still_shown_token_by_token() -> None:
    tokenizer = build_tokenizer()
    token_ids = tokenizer("1. END")["input_ids"]
    assert TokenText(tokenizer).lengths(token_ids, "1. ") == [1, 1, 1, 0, 0, 0]


class OwnEngine:
    """It knows no stops."""


def test_response_of_an_engine_without_stops_is_cut() -> None:
    encoder = PromptEncoder(build_tokenizer(), None)
    token_ids = encoder.tokenizer("4\nQ: 5")["input_ids"]
    spans = [VersionSpan(1, 0, 2), VersionSpan(2, 2, 5), VersionSpan(3, 5, 6)]
    response = GeneratedResponse(token_ids, [-0.5] * 6, "length", spans, "4\nQ: 5")
    sampling = Sampling(6, 1.0, 0, stop=("Q",))
    (cut,) = ended(OwnEngine(), [response], sampling, encoder)
    assert (cut.token_ids, cut.rollout_logprobs) == (token_ids[:3], [-0.5] * 3)
    assert (cut.text, cut.finish_reason) == ("4\n", "stop")
    assert cut.version_spans == [VersionSpan(1, 0, 2), VersionSpan(2, 2, 3)]
    assert cut_at_stop(response, encoder.decode, Sampling(6, 1.0, 0, stop=("R",))) is response
    assert ended(OwnEngine(), [response], Sampling(6, 1.0, 0), encoder) == [response]


@pytest.mark.parametrize(
    ("sampling", "named"),
    [({"temperature": 0.0}, "greedy"), ({"top_p": 0.5, "top_k": 2}, "top_k, top_p"), ({"min_tokens": 3}, "min_tokens")],
)
def test_engine_that_does_not_follow_a_sampling_is_refused(sampling: dict, named: str) -> None:
    asked = Sampling(**({"max_response_tokens": 6, "temperature": 1.0, "seed": 0} | sampling))
    with pytest.raises(ValueError, match=f"OwnEngine does not follow {named} of the evaluation"):
        check_taken(OwnEngine(), asked)
    check_taken(OwnEngine(), Sampling(6, 1.0, 0, stop=("Q",), stop_token_ids=(3,)))


def test_task_asks_for_its_stops_and_a_special_token_by_its_text() -> None:
    encoder = PromptEncoder(build_tokenizer(), None)
    task = PromptTask(max_response_tokens=9, temperature=0.5, stop=["\nQ", "<|endoftext|>"], stop_token_ids=[7])
    assert sampling_of(task, encoder, seed=3) == Sampling(9, 0.5, 3, stop=("\nQ",), stop_token_ids=(7, 256))
    assert sampling_of(PromptTask(max_response_tokens=9, temperature=0.5), encoder, 3, 4) == Sampling(4, 0.5, 3)


# ---- the end of a turn -------------------------------------------------------------------------------------------


def tokenizer_with(template: str | None = CHAT_TEMPLATE, eos_token: str = "<|endoftext|>") -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer()
    tokenizer.chat_template, tokenizer.eos_token = template, eos_token
    return tokenizer


def model_with(folder: Path, **files: object) -> Path:
    for name, end_ids in ({"config": 256} | files).items():
        (folder / f"{name}.json").write_text(json.dumps({"eos_token_id": end_ids}), encoding="utf-8")
    return folder


CHAT = JobConfig.model_validate(job_body())


def test_end_of_the_templates_turn_is_a_stop_and_is_named(tmp_path: Path) -> None:
    encoder = PromptEncoder(tokenizer_with(), None)
    sentence = add_end_of_turn(encoder, CHAT.data, model_with(tmp_path))
    assert encoder.turn_end_ids == (258,)
    assert "ends an answer with <|im_end|> (token 258)" in sentence
    assert "eos_token_id: 256" in sentence
    assert sampling_of(PromptTask(max_response_tokens=9, temperature=1.0), encoder, 0).stop_token_ids == (258,)


@pytest.mark.parametrize(
    ("tokenizer", "files"),
    [
        (tokenizer_with(eos_token="<|im_end|>"), {}),
        (tokenizer_with(), {"generation_config": [256, 258]}),
        (tokenizer_with(None), {}),
        (tokenizer_with("{% for message in messages %}{{ message['content'] }}\n{% endfor %}"), {}),
        (tokenizer_with("{{ raise_exception('no') }}"), {}),
    ],
    ids=["end of the tokenizer", "end of the files", "no template", "no mark", "a template that refuses"],
)
def test_nothing_is_added_to_a_model_that_stops_by_itself(tokenizer, files: dict, tmp_path: Path) -> None:
    encoder = PromptEncoder(tokenizer, None)
    assert add_end_of_turn(encoder, CHAT.data, model_with(tmp_path, **files)) == ""
    assert encoder.turn_end_ids == ()


def test_plain_prompts_do_not_end_with_a_turn(tmp_path: Path) -> None:
    data = {"type": "jsonl", "path": "rows.jsonl", "as_chat": False}
    plain = JobConfig.model_validate(job_body(data=data))
    assert add_end_of_turn(PromptEncoder(tokenizer_with(), None), plain.data, model_with(tmp_path)) == ""


def test_bundled_model_needs_no_other_end(smollm2, tmp_path: Path) -> None:
    encoder = PromptEncoder(smollm2, None)
    assert add_end_of_turn(encoder, CHAT.data, model_with(tmp_path, config=smollm2.eos_token_id)) == ""


def test_end_tokens_of_both_files_count(tmp_path: Path) -> None:
    assert read_end_ids(model_with(tmp_path, config=[1, 2], generation_config=3)) == {1, 2, 3}
    assert read_end_ids(model_with(tmp_path, config=None, generation_config=None)) == set()


@pytest.mark.parametrize(
    ("stops", "sentence"),
    [
        ({"stop_token_ids": [3, 512]}, "rollout.stop_token_ids: 512 is not one of the 259 tokens"),
        ({"stop": ["<|im_end|>\n"]}, "has the special token <|im_end|> of fake inside"),
    ],
)
def test_trainer_refuses_stops_that_cannot_be_sampled(monkeypatch, stops: dict, sentence: str) -> None:
    monkeypatch.setattr(stop_check, "load_tokenizer", lambda _: build_tokenizer())
    rollout = job_body()["rollout"]
    job = JobConfig.model_validate(job_body(model={"path": "fake"}, rollout=rollout | stops))
    with pytest.raises(ValueError, match="rollout") as refused:
        stop_check.check_stops("fake", job)
    assert sentence in str(refused.value)
    good = JobConfig.model_validate(job_body(rollout=rollout | {"stop": ["<|im_end|>", "\nQ"], "stop_token_ids": [3]}))
    stop_check.check_stops("fake", good)
