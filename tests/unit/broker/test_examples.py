"""Rows of examples: prompt and response, or a whole conversation; what is wrong with one, in a sentence."""

import json

import pytest

from onbeat.config import JobConfig
from services.broker.datasets import DatasetError, DatasetSpec
from services.broker.datasets.files import FileDataset
from tests.world import job_body

QUESTION, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
PAIR = {"prompt": "2+2?", "response": "4"}


def read(folder, row, learn="answers", **data):
    path = folder / "examples.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    prompts = {"as_chat": data.pop("as_chat", True)}
    section = {"num_rows_per_iteration": 1, "num_iterations": 1, "learn": learn}
    section |= {"data": {"type": "jsonl", "path": path.name} | data}
    spec = DatasetSpec.of_examples(JobConfig.model_validate(job_body(data=prompts, warm_start=section)))
    return [(message.role, message.content) for message in FileDataset(spec.data, spec, folder).item(0).messages]


def test_a_pair_becomes_a_conversation(tmp_path):
    assert read(tmp_path, PAIR, system_prompt="Be brief.") == [
        ("system", "Be brief."),
        ("user", "2+2?"),
        ("assistant", "4"),
    ]


def test_a_conversation_stays_as_it_is(tmp_path):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    assert read(tmp_path, row, messages_field="messages") == turns


WRONG = [
    (PAIR | {"response": " "}, {}, "data.response_field", "line 1 has an empty response; write one"),
    (PAIR | {"response": 4}, {}, "data.response_field", "line 1 has a response that is no text: '4'"),
    ({"prompt": "a"}, {}, "data.response_field", "has no 'response'; it has: prompt"),
    (PAIR | {"tools": ["x"]}, {}, "data.metadata_only", "has something in 'tools', which the model would not see"),
    ({"a": []}, {"messages_field": "a"}, "data.messages_field", "has no list of {role, content} messages in 'a'"),
    (
        {"a": [{"role": "user", "content": "x"}]},
        {"messages_field": "a"},
        "data.messages_field",
        "ends with a message of the role 'user', which has no answer",
    ),
    (
        {"a": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]},
        {"messages_field": "a"},
        "data.messages_field",
        "has an empty answer, number 1 of 1",
    ),
    (
        {"a": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [1]}]},
        {"messages_field": "a"},
        "data.messages_field",
        "has a message 2 with tool_calls, which the prompt would not show",
    ),
    ({"a": [ANSWER]}, {"messages_field": "a"}, "data.messages_field", "begins with an answer, and has no prompt"),
    ({"prompt": [ANSWER, QUESTION], "response": "4"}, {}, "data.prompt_field", "line 1 begins with an answer"),
    (
        {"prompt": [QUESTION, ANSWER | {"content": " "}, QUESTION], "response": "4"},
        {},
        "data.prompt_field",
        "has an empty answer, number 1 of 2",
    ),
    ({"a": [QUESTION, ANSWER] * 2}, {"messages_field": "a", "as_chat": False}, "data.messages_field", "split the row"),
]


@pytest.mark.parametrize(("row", "data", "field", "sentence"), WRONG)
def test_wrong_rows_are_named(tmp_path, row, data, field, sentence):
    with pytest.raises(DatasetError) as refused:
        read(tmp_path, row, **data)
    assert refused.value.field == field
    assert sentence in refused.value.message
    assert "data." not in refused.value.message  # the section may be another one, such as warm_start.held_out.data


def test_rows_are_taken_as_the_trainer_takes_them(tmp_path):
    """Answers that are not learned may be empty, and plain rows are a prompt with its response."""
    turns = [QUESTION, ANSWER | {"content": ""}, QUESTION, ANSWER]
    shown = [(turn["role"], turn["content"]) for turn in turns]
    assert read(tmp_path, {"a": turns}, learn="last_answer", messages_field="a") == shown
    assert read(tmp_path, PAIR, as_chat=False) == [("user", "2+2?"), ("assistant", "4")]
