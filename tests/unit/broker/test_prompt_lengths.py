"""Prompts that are too long are found before a job begins, by the tokenizer that its rollouts use."""

import json
from pathlib import Path
from typing import Any

import pytest

from onbeat.config import FileData
from onbeat.streams.codec import Message, PromptTask
from services.broker.datasets import DatasetError, DatasetSpec, lengths
from services.broker.datasets.child import open_dataset
from services.prompts.prompt_tokenizer import PromptTokenizer
from services.rollout.prompts import PromptEncoder
from services.trainer.prompt_lengths import tokenise
from tests.tiny_models import build_tokenizer

pytestmark = pytest.mark.slow

ROWS = [{"prompt": "x" * size, "answer": "1"} for size in (5, 300, 20, 40, 500)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a data folder with rows.jsonl and the tokenizer of a model."""
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def open_rows(folder: Path, model: str = "", **options: Any) -> Any:
    data = FileData.model_validate({"type": "jsonl", "path": "rows.jsonl", "order": "in_order"} | options)
    model_path = model or str(folder / "model")
    return open_dataset(DatasetSpec(data=data, seed=0, num_items=100, model_path=model_path), folder)


def test_prompts_are_tokenised_as_rollouts_do():
    tokenizer = build_tokenizer()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    tasks = [PromptTask(text="2 + 2 ="), PromptTask(messages=[Message(**message) for message in messages])]
    encoder = PromptEncoder(tokenizer, None)
    token_ids = [
        tokenise(PromptTokenizer(tokenizer), prompt) for prompt in ({"text": "2 + 2 ="}, {"messages": messages})
    ]
    assert token_ids == [encoder.encode(task) for task in tasks]


def test_too_long_prompts_are_dropped_in_every_epoch(folder, monkeypatch):
    dataset = open_rows(folder, max_prompt_tokens=100)
    assert [dataset.item(index).row for index in range(7)] == [0, 2, 3, 0, 2, 3, 0]
    assert "2 of 5 prompts have more than 100 tokens; the longest is line 5 with 5" in dataset.note
    monkeypatch.setattr(lengths, "count_in_process", lambda *_: pytest.fail("the counts are kept"))
    assert open_rows(folder, max_prompt_tokens=10_000).note == ""
    shuffled = open_rows(folder, max_prompt_tokens=100, order="shuffled")
    assert sorted(shuffled.item(index).row for index in range(3)) == [0, 2, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_prompt_tokens": 100, "on_too_long": "refuse"}, "or set on_too_long = 'drop'"),
        ({"max_prompt_tokens": 2}, "5 of 5 prompts have more than 2 tokens"),
    ],
)
def test_data_with_too_long_prompts_is_refused(folder, options, words):
    with pytest.raises(DatasetError) as caught:
        open_rows(folder, **options)
    assert (caught.value.field, words in caught.value.message) == ("data.max_prompt_tokens", True)


def test_bundled_model_that_is_not_known_is_named(folder):
    with pytest.raises(DatasetError, match="where the broker runs: bundled:nothing is not known; known: "):
        open_rows(folder, model="bundled:nothing", max_prompt_tokens=100)


def test_tokenizer_that_is_not_here_is_named(folder):
    (folder / "model").rename(folder / "elsewhere")
    with pytest.raises(DatasetError, match=r"the tokenizer of .*model cannot be used where the broker runs"):
        open_rows(folder, max_prompt_tokens=100)
