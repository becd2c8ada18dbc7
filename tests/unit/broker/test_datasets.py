"""Prompts as pure functions of (job, iteration), and every way in which data can be wrong."""

import asyncio
import datetime
import decimal
import fcntl
import importlib.util
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from onbeat.config import EvaluationConfig, FileData, HubData, JobConfig, ReasoningGymData
from onbeat.contracts.answers import IS_NUMBER
from onbeat.local.redis_choice import embedded_server
from onbeat.local.redis_server import redis_service
from onbeat.local.state import StackLock
from onbeat.process.stacks import StackState
from services.broker.datasets import DatasetError, DatasetSpec
from services.broker.datasets.child import ReadRequest, answer_request, open_dataset
from services.broker.datasets.files import epoch_order
from services.broker.datasets.messages import INPUT_COLUMNS
from services.broker.datasets.process import DatasetPool, DatasetProcess
from services.broker.tasks import build_evaluation_tasks, build_tasks
from tests.world import job_body

ROWS = [{"prompt": f"say {i}", "answer": i, "level": i % 3} for i in range(10)]
FOUR = {"prompt": "2 + 2", "answer": "four"}


def write_jsonl(path: Path, rows: list[Any] | bytes) -> None:
    if isinstance(rows, bytes):
        path.write_bytes(rows)
    else:
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


def open_file(folder: Path, seed: int = 0, **options: Any) -> Any:
    data = FileData.model_validate({"type": "jsonl", "path": "rows.jsonl"} | options)
    return open_dataset(DatasetSpec(data=data, seed=seed, num_items=100), folder)


def refusal(folder: Path, **options: Any) -> DatasetError:
    """Return why the file is refused, when it is opened or when its rows are read."""
    with pytest.raises(DatasetError) as caught:
        read_all(open_file(folder, **options))
    return caught.value


def read_all(dataset: Any) -> None:
    for row in range(dataset.num_rows):
        dataset.to_item(row)


# ---- files -------------------------------------------------------------------------------------------------------


def test_row_has_a_second_prompt_for_the_teacher(tmp_path):
    """It becomes messages as the first one does, and another field of the row may be a part of its name."""
    rows = [{"prompt": "2 + 2", "answer": "4", "for": {"teacher": "2 + 2 is 4"}}, {"prompt": "a", "answer": "b"}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    data = FileData.model_validate({"type": "jsonl", "path": "rows.jsonl", "system_prompt": "short"})
    spec = DatasetSpec(data=data, seed=0, num_items=2, teacher_prompt_field="for.teacher")
    dataset = open_dataset(spec, tmp_path)
    item = dataset.to_item(0)
    assert [message.content for message in item.messages] == ["short", "2 + 2"]
    assert [message.content for message in item.teacher_messages] == ["short", "2 + 2 is 4"]
    config = JobConfig.model_validate(job_body())
    (task,) = build_tasks(config, 0, [item])
    assert [message.content for message in task.teacher_messages] == ["short", "2 + 2 is 4"]
    with pytest.raises(DatasetError, match=r"^teacher.prompt_field: rows.jsonl, line 2 has no 'for.teacher'; it has"):
        dataset.to_item(1)


def test_nested_fields_are_named_with_dots(tmp_path):
    row = {"ask": {"text": "2 + 2"}, "reward_model": {"ground_truth": 4, "style": "rule"}}
    row |= {"a.b": "own", "a": {"b": "x"}}
    write_jsonl(tmp_path / "rows.jsonl", [row])
    item = open_file(tmp_path, prompt_field="ask.text", answer_field="reward_model.ground_truth").item(0)
    assert (item.messages[0].content, item.context["answer"]) == ("2 + 2", "4")
    assert item.context["metadata"]["reward_model"]["style"] == "rule"
    assert open_file(tmp_path, prompt_field="a.b", answer_field=None).item(0).messages[0].content == "own"
    error = refusal(tmp_path, prompt_field="ask.txt", answer_field=None)
    assert (error.field, "has no 'ask.txt'" in error.message) == ("data.prompt_field", True)


@pytest.mark.parametrize(
    ("pattern", "answer"), [(r"#### (.+)", "1,072"), (r"\d+", "072"), (r"#### (\d+)?", "1"), (r"(x)?$", "")]
)
def test_answer_is_the_last_match_of_the_pattern(tmp_path, pattern, answer):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "?", "answer": "He has 1000 + 72.\n#### 3\n#### 1,072 "}])
    assert open_file(tmp_path, answer_pattern=pattern).item(0).context["answer"] == answer


def test_every_epoch_visits_every_row_once_in_its_own_order(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    dataset = open_file(tmp_path, seed=5)
    epochs = [[dataset.item(epoch * 10 + i).messages[0].content for i in range(10)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == [f"say {i}" for i in range(10)]
    assert epochs[0] != epochs[1] != epochs[2]
    again = open_file(tmp_path, seed=5)
    assert [again.item(25 - i).messages[0].content for i in range(6)] == epochs[2][5::-1]  # any order of items


def test_order_depends_on_seed_and_epoch_and_never_changes():
    """Recorded: a job that is resumed by a later version of Onbeat must see the same prompts."""
    recorded = [1, 4, 7, 5, 6, 3, 2, 0]
    assert list(epoch_order(seed=1, epoch=0, num_rows=8)) == recorded
    assert list(epoch_order(1, 1, 8)) != recorded
    assert list(epoch_order(2, 0, 8)) != recorded


def test_unshuffled_rows_come_in_the_order_of_the_file(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ["", json.dumps(ROWS[0]), "  ", *map(json.dumps, ROWS[1:])])
    dataset = open_file(tmp_path, order="in_order")
    assert [dataset.item(i).messages[0].content for i in (0, 9, 10)] == ["say 0", "say 9", "say 0"]


def test_reward_gets_question_answer_and_the_other_fields(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    item = open_file(tmp_path, order="in_order").item(4)
    assert item.context == {"question": "say 4", "answer": "4", "answer_is_number": True, "metadata": {"level": 1}}


def test_chat_prompts_and_system_prompt(tmp_path):
    """Templates that do not know the role `developer` would leave its message out."""
    roles = {"well": "developer", "hi": "user", "ho": "assistant", "so?": "user"}
    chat = [{"role": role, "content": content} for content, role in roles.items()]
    write_jsonl(tmp_path / "rows.jsonl", [{"chat": chat, "answer": "yes"}])
    item = open_file(tmp_path, prompt_field="chat", system_prompt="be brief").item(0)
    assert {m.content: m.role for m in item.messages} == roles | {"be brief": "system", "well": "system"}
    assert item.context["question"] == "so?"


def test_plain_prompt_has_no_messages(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    item = open_file(tmp_path, as_chat=False, order="in_order").item(0)
    assert (item.text, item.messages) == ("say 0", [])


def test_parquet_reads_the_same_as_jsonl(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=3)
    jsonl, parquet = open_file(tmp_path), open_file(tmp_path, type="parquet", path="rows.parquet")
    assert [jsonl.item(i) for i in range(25)] == [parquet.item(i) for i in range(25)] == parquet.items(range(25))


def test_prompts_of_an_iteration_read_each_row_group_once(tmp_path, calls_of):
    """The order of the prompts is shuffled: each of them would read another row group in nearly all cases."""
    rows = [{"prompt": f"say {number}", "answer": str(number)} for number in range(400)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=20)
    dataset = open_file(tmp_path, type="parquet", path="rows.parquet")
    request = ReadRequest(spec=DatasetSpec(data=dataset._data, seed=0, num_items=100), first=0, count=100, timeout_s=9)
    passes = calls_of(pyarrow.parquet.ParquetFile, "iter_batches")
    answer = answer_request(request, tmp_path, {request.spec.model_dump_json(): dataset})
    assert len({item["context"]["answer"] for item in answer["items"]}) == 100
    assert 0 < len(passes) <= 20


def test_row_group_is_larger_than_the_memory_that_its_rows_take(tmp_path):
    """An unused column of 200 MB is a few kilobytes on disk, and one row group."""
    texts = pyarrow.array(["x" * 8_000, "y" * 8_000] * 12_500)
    prompts = [f"say {number}" for number in range(len(texts))]
    table = pyarrow.table({"prompt": prompts, "answer": prompts, "notes": texts})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=len(texts))
    unpacked_bytes = table.nbytes
    del table, texts
    before = pyarrow.total_allocated_bytes()
    dataset, held = open_file(tmp_path, type="parquet", path="rows.parquet"), []
    for row in range(dataset.num_rows):
        item = dataset.to_item(row)
        held.append(pyarrow.total_allocated_bytes() - before)
        assert item.context["answer"] == f"say {row}"
    assert item.context["metadata"] == {"notes": "y" * 8_000}
    assert max(held) < unpacked_bytes / 5


def test_rows_of_a_group_are_read_in_any_order(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=4)
    dataset = open_file(tmp_path, type="parquet", path="rows.parquet")
    expected = [dataset.to_item(row) for row in range(dataset.num_rows)]
    rows = [*reversed(range(dataset.num_rows)), 0, dataset.num_rows - 1, 3, 3, 4]
    assert [dataset.to_item(row) for row in rows] == [expected[row] for row in rows]


async def test_values_that_json_does_not_have_come_as_text(tmp_path):
    rows = [{"prompt": "when?", "answer": "x", "day": datetime.date(2026, 11, 27)}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    process = DatasetProcess(tmp_path, timeout_s=60, memory_mb=4096)
    data = FileData(type="parquet", path="rows.parquet")
    (item,), _ = await process.read(DatasetSpec(data=data, seed=0, num_items=1), 0, 1)
    assert item.context["metadata"] == {"day": "2026-11-27"}
    await process.close()


@pytest.mark.parametrize(
    ("rows", "options", "field", "message"),
    [
        ([], {}, "data.path", "has no rows"),
        (["", "  "], {}, "data.path", "has no rows"),
        ([ROWS[0], "", "{nope"], {}, "data.path", "line 3 is not valid JSON"),
        ([ROWS[0], "[1]"], {}, "data.path", "line 2 is not a JSON object"),
        (["[" * 100_000], {}, "data.path", "line 1 is not valid JSON"),
        ([{"q": "x", "answer": 1}], {}, "data.prompt_field", "line 1 has no 'prompt'; it has: answer, q"),
        ([ROWS[0], {"prompt": "x"}], {}, "data.answer_field", "line 2 has no 'answer'"),
        ([ROWS[0], {"prompt": "x", "answer": None}], {}, "data.answer_field", "line 2 has null in 'answer'; give it"),
        ([{"prompt": "", "answer": 1}], {}, "data.prompt_field", "line 1 has an empty prompt"),
        ([{"prompt": " \n", "answer": 1}], {}, "data.prompt_field", "line 1 has an empty prompt"),
        ([{"prompt": [{"role": "user", "content": ""}], "answer": 1}], {}, "data.prompt_field", "an empty prompt"),
        (
            [ROWS[0], '{"prompt": "x", "answer": 1, "prompt": "y"}'],
            {},
            "data.path",
            "line 2 is not valid JSON: it has 'prompt' twice",
        ),
        (['{"prompt": "x", "answer": {"value": 1, "value": 2}}'], {}, "data.path", "it has 'value' twice; keep one"),
        ([{"prompt": '[{"role": "user", "content": "x"}]', "answer": 1}], {}, "data.prompt_field", "written as a text"),
        ([{"prompt": "[ {'content': 'x', 'role': 'user'}]", "answer": 1}], {}, "data.prompt_field", "write the list"),
        ([{"prompt": 7, "answer": 1}], {}, "data.prompt_field", "neither a string nor a list"),
        ([{"prompt": ["hi"], "answer": 1}], {}, "data.prompt_field", "neither a string nor a list"),
        ([r'{"prompt": "\ud800", "answer": 1}'], {}, "data.prompt_field", "half a surrogate pair in its prompt"),
        ([{"prompt": [{"role": "user", "content": "x"}], "answer": 1}], {"as_chat": False}, "data.as_chat", "as_chat"),
        ([{"prompt": [{"role": "usr", "content": "x"}], "answer": 1}], {}, "data.prompt_field", "of the role 'usr'"),
        (['{"prompt": "x", "answer": NaN}'], {}, "data.answer_field", "line 1 has the answer nan"),
        ([{"prompt": "x", "answer": 1}], {"path": "a" * 300}, "data.path", "is not a path: File name too long"),
        ([ROWS[0]], {"as_chat": False, "system_prompt": "x"}, "data.system_prompt", "as_chat = true"),
        ([ROWS[0]], {"path": "other.jsonl"}, "data.path", "there is no file other.jsonl"),
        ([ROWS[0]], {"path": "../rows.jsonl"}, "data.path", "outside the broker's data folder"),
        ([ROWS[0]], {"path": "/etc/passwd"}, "data.path", "outside the broker's data folder"),
        ([ROWS[0]], {"path": "a\0b"}, "data.path", "is not a path"),
        ([ROWS[0]], {"path": "."}, "data.path", "there is no file"),
        ([ROWS[0]], {"type": "parquet"}, "data.path", "not a Parquet file"),
        ('{"prompt": "x", "answer": "y"}'.encode("utf-16"), {}, "data.path", "a UTF-16 file"),
        (b"\x1f\x8b\x08\x00rest", {}, "data.path", "a gzip file"),
        (b"PAR1rest", {}, "data.path", "a Parquet file, not JSON lines; set type = 'parquet'"),
        ([FOUR], {"answer_pattern": "#"}, "data.answer_pattern", "match of '#' in its answer, which ends with 'four'"),
        ([FOUR], {"answer_pattern": "(("}, "data.answer_pattern", "is no regular expression: "),
        ([FOUR], {"answer_pattern": "x", "answer_field": None}, "data.answer_pattern", "needs answer_field, in"),
    ],
)
def test_wrong_file_is_refused_with_field_and_place(tmp_path, rows, options, field, message):
    write_jsonl(tmp_path / "rows.jsonl", rows)
    error = refusal(tmp_path, **options)
    assert error.field == field
    assert message in error.message


def test_list_of_messages_may_be_meant_as_text(tmp_path):
    prompt = '[{"role": "user", "content": "x"}] What is the role?'
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt, "answer": "user"}])
    assert open_file(tmp_path, as_chat=False).item(0).text == prompt
    write_jsonl(tmp_path / "messages.jsonl", [{"prompt": [{"role": "user", "content": prompt}], "answer": "user"}])
    assert open_file(tmp_path, path="messages.jsonl").item(0).messages[0].content == prompt


@pytest.mark.parametrize("name", ["system", "system_prompt", "history", "image_path"])
def test_column_with_a_part_of_the_prompt_is_refused(tmp_path, name):
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "x", "answer": 1, name: "more"}])
    error = refusal(tmp_path)
    assert (error.field, f"has something in {name!r}" in error.message) == ("data.metadata_only", True)
    assert open_file(tmp_path, metadata_only=[name]).item(0).context["metadata"] == {name: "more"}


@pytest.mark.parametrize(
    ("prompt_field", "name"),
    [("instruction", "input"), ("question", "choices"), ("question", "context"), ("question", "options")],
)
def test_other_half_of_a_question_is_refused(tmp_path, prompt_field, name):
    row = {prompt_field: "x", "answer": 1, name: ["A", "B"]}
    write_jsonl(tmp_path / "rows.jsonl", [row])
    assert f"has something in {name!r}" in refusal(tmp_path, prompt_field=prompt_field).message
    write_jsonl(tmp_path / "rows.jsonl", [row | {name: []}])
    assert open_file(tmp_path, prompt_field=prompt_field).num_rows == 1
    write_jsonl(tmp_path / "rows.jsonl", [row | {"prompt": "x: A, B"}])
    assert open_file(tmp_path).item(0).messages[0].content == "x: A, B"


def parquet_answer(folder: Path, column: Any) -> Any:
    """Return the context of a row of Parquet whose answer is the first value of this column."""
    table = pyarrow.table({"prompt": ["x"] * len(column), "answer": column})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    return open_file(folder, type="parquet", path="rows.parquet").to_item(0).context


@pytest.mark.parametrize(
    ("column", "answer", "is_number"),
    [
        (pyarrow.array([0.1], pyarrow.float32()), "0.1", True),
        (pyarrow.array([16777216.0], pyarrow.float32()), "16777216.0", True),
        (pyarrow.array([0.1], pyarrow.float64()), "0.1", True),
        (pyarrow.array([decimal.Decimal("42.00")]), "42.00", True),
        (pyarrow.array([datetime.date(2026, 1, 2)]), "2026-01-02", False),
        (pyarrow.array([0.5], pyarrow.float16()), "0.5", True),
        (pyarrow.array([{"value": 0.3}], pyarrow.struct([("value", pyarrow.float32())])), {"value": 0.3}, False),
    ],
)
def test_number_of_parquet_is_the_one_that_was_written(tmp_path, column, answer, is_number):
    context = parquet_answer(tmp_path, column)
    assert (context["answer"], IS_NUMBER in context) == (answer, is_number)


# ---- what the model would not see --------------------------------------------------------------------------------

USER = {"role": "user", "content": "2 + 2?"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "assistant", "content": "", "tool_calls": [CALL]}, "a message 2 with tool_calls, which the prompt"),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, "a message 2 with tool_calls, which the prompt"),
        ({"role": "assistant", "content": None, "function_call": {"name": "add"}}, "message 2 with function_call"),
        ({"role": "tool", "content": "4", "tool_call_id": "1"}, "a message 2 with tool_call_id, which the prompt"),
        ({"role": "user", "content": "x", "name": "Ann"}, "a message 2 with name, which the prompt would not show"),
        ({"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}, "message 2 with reasoning_content"),
        ({"role": "assistant", "content": "The answer is ", "prefix": True}, "a message 2 with prefix, which"),
        ({"role": "user", "content": None}, "a message 2 without content; write a text"),
        ({"role": "user"}, "a message 2 without content; write a text"),
        ({"role": "user", "content": 7}, "a message 2 whose content is neither a string nor a list of parts: '7'"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "a part of the type 'image_url'"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, "a part of the type 'image'"),
        ({"role": "user", "content": "\ud800"}, "a message 2 whose content is neither"),
        ({"role": ["user"], "content": "x"}, "a message 2 of the role \"['user']\"; the roles are"),
        ("hello", "a message 2 that is 'hello', and not {role, content}"),
        ({"role": "assistant", "content": "The answer is "}, "ends with a message of the assistant's"),
        ({"role": "assistant", "content": "<think>\n"}, "ends with a message of the assistant's"),
    ],
)
def test_message_that_would_lose_something_is_refused(tmp_path, message, reason):
    write_jsonl(tmp_path / "rows.jsonl", [ROWS[0], {"prompt": [USER, message], "answer": "4"}])
    error = refusal(tmp_path)
    assert (error.field, error.message[:19]) == ("data.prompt_field", "rows.jsonl, line 2 ")
    assert reason in error.message


def test_empty_fields_of_a_message_lose_nothing(tmp_path):
    message = USER | {"tool_calls": None, "name": "", "images": [], "weight": None, "prefix": False}
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": [message], "answer": "4"}])
    assert open_file(tmp_path).item(0).messages[0].content == "2 + 2?"


def test_parts_of_text_are_joined(tmp_path):
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
    write_jsonl(tmp_path / "rows.jsonl", [{"prompt": [{"role": "user", "content": parts}], "answer": "4"}])
    item = open_file(tmp_path).item(0)
    assert (item.messages[0].content, item.context["question"]) == ("2 + 2?", "2 + 2?")


@pytest.mark.parametrize("column", sorted(INPUT_COLUMNS))
@pytest.mark.parametrize("as_chat", [True, False])
def test_column_that_looks_like_an_input_is_refused(tmp_path, column, as_chat):
    rows = [{"prompt": "x", "answer": "4", column: None}, {"prompt": "y", "answer": "4", column: [{"a": 1}]}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    error = refusal(tmp_path, as_chat=as_chat)
    assert error.field == "data.metadata_only"
    assert f"line 2 has something in {column!r}, which the model would not see" in error.message
    item = open_file(tmp_path, as_chat=as_chat, metadata_only=[column], order="in_order").item(1)
    assert item.context["metadata"] == {column: [{"a": 1}]}


def test_prompt_in_a_column_with_such_a_name_is_read(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", [{"documents": "2 + 2?", "tools": "4"}])
    item = open_file(tmp_path, prompt_field="documents", answer_field="tools").item(0)
    assert (item.messages[0].content, item.context["answer"]) == ("2 + 2?", "4")


def test_link_out_of_the_data_folder_is_refused(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_jsonl(tmp_path / "secret.jsonl", ROWS)
    (folder / "rows.jsonl").symlink_to(tmp_path / "secret.jsonl")
    assert "outside" in refusal(folder).message


@pytest.mark.parametrize("folder", ["", "sub/../", "link/"])
def test_password_of_the_local_stack_is_no_data(tmp_path, monkeypatch, folder):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    redis_service(tmp_path, *embedded_server())
    StackLock(tmp_path).write(StackState(1, "up", "http://u", "redis://:password@r", 1.0))
    (tmp_path / "stack.new").write_bytes((tmp_path / "stack.json").read_bytes())
    for name in ("stack.json", "STACK.json", "stack.new", "redis/redis.conf"):
        message = refusal(tmp_path, path=f"{folder}{name}", prompt_field="redis_url", answer_field=None).message
        assert "belongs to the local stack, and no job may read it" in message
    with pytest.raises(DatasetError, match="redis cannot be fetched: "):
        open_hub(tmp_path, path="redis", subset=None)


def test_absolute_path_inside_the_data_folder_is_fine(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    assert open_file(tmp_path, path=str(tmp_path / "rows.jsonl")).item(0)


def test_file_that_changes_or_vanishes_is_noticed(tmp_path):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    dataset = open_file(tmp_path)
    assert dataset.is_current()
    write_jsonl(tmp_path / "rows.jsonl", ROWS[:3])
    assert not dataset.is_current()
    (tmp_path / "rows.jsonl").unlink()
    assert not dataset.is_current()


# ---- reasoning_gym -----------------------------------------------------------------------------------------------


def gym(task: str = "chain_sum", options: dict[str, Any] | None = None, num_items: int = 40) -> Any:
    data = ReasoningGymData(task=task, options=options or {})
    return open_dataset(DatasetSpec(data=data, seed=3, num_items=num_items), Path())


def test_question_is_the_original_user_message_with_its_answer():
    from reasoning_gym import create_dataset

    entry = create_dataset("chain_sum", seed=3, size=40, max_terms=2)[17]
    item = gym(options={"max_terms": 2}).item(17)
    assert [(m.role, m.content) for m in item.messages] == [("user", entry["question"])]
    assert item.context["answer"] == entry["answer"]
    assert item.context["task"] == "chain_sum"
    assert item.context["options"] == {"max_terms": 2}


def test_items_do_not_depend_on_the_length_of_the_job():
    assert gym(num_items=40).item(39).messages == gym(num_items=4_000_000).item(39).messages


@pytest.mark.parametrize(
    ("task", "options", "field", "message"),
    [
        ("chain_sums", {}, "data.task", "did you mean chain_sum"),
        ("no such thing at all", {}, "data.task", "there are: "),
        ("chain_sum", {"max_term": 2}, "data.options.max_term", "no such option; it has:"),
        ("chain_sum", {"seed": 2}, "data.options.seed", "set the job's seed"),
        ("chain_sum", {"size": 2}, "data.options.size", "cannot be set here"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "data.options", "refuses them"),
        ("chain_sum", {"min_terms": "two"}, "data.options", "refuses them"),
        ("composite", {}, "data.options", "at least one dataset"),
    ],
)
def test_wrong_task_or_option_is_refused(task, options, field, message):
    with pytest.raises(DatasetError) as caught:
        gym(task, options)
    assert caught.value.field == field
    assert message in caught.value.message


LISTED = """
import sys
from services.broker.app import create_tracer
from services.broker.settings import Settings
assert create_tracer(Settings(), None, None) is None
heavy = ("reasoning_gym", "pyarrow", "numpy", "torch", "opentelemetry.exporter", "services.broker.tracing")
print(*(name for name in sys.modules if name.startswith(heavy)))
"""


def test_broker_imports_nothing_heavy_and_no_tracing_by_default(monkeypatch):
    """Also where the environment has a collector for everybody's programs. (redis-py imports the SDK by itself.)"""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    done = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


# ---- tasks -------------------------------------------------------------------------------------------------------


def job(**changes: Any) -> JobConfig:
    body = job_body(
        data={"type": "reasoning_gym", "task": "chain_sum", "system_prompt": "think"},
        reward={"name": "reasoning_gym", "options": {"answer_pattern": "x"}, "timeout_s": 3},
        rollout={"num_prompts_per_iteration": 4, "num_samples_per_prompt": 6, "max_response_tokens": 7},
    )
    return JobConfig.model_validate(body | changes)


def tasks_of(config: JobConfig, iteration: int) -> list[Any]:
    dataset = open_dataset(DatasetSpec.of_job(config), Path())
    return build_tasks(config, iteration, [dataset.item(iteration * 4 + i) for i in range(4)])


def test_tasks_are_a_pure_function_of_job_and_iteration():
    first, again = tasks_of(job(), 2), tasks_of(job(), 2)
    for one, other in zip(first, again, strict=True):
        assert one.SerializeToString(deterministic=True) == other.SerializeToString(deterministic=True)
    assert [task.group_id for task in first] == ["2-0", "2-1", "2-2", "2-3"]
    others = [tasks_of(job(), 3), tasks_of(job(seed=1), 2)]
    for other in others:
        assert {task.seed for task in other}.isdisjoint({task.seed for task in first})
        assert [task.messages[-1].content for task in other] != [task.messages[-1].content for task in first]


def test_task_carries_all_that_a_stateless_rollout_needs():
    task = tasks_of(job(), 1)[3]
    assert (task.iteration, task.group_id, task.is_evaluation) == (1, "1-3", False)
    assert (task.num_samples, task.max_response_tokens, task.temperature, task.deadline_s) == (6, 7, 1.0, 300.0)
    assert [message.role for message in task.messages] == ["system", "user"]
    assert (task.reward.name, json.loads(task.reward.options_json)) == ("reasoning_gym", {"answer_pattern": "x"})
    assert (task.reward.timeout_s, task.reward.memory_limit_mb) == (3.0, 2048)
    assert {"question", "answer", "metadata", "task", "options"} <= json.loads(task.reward_context_json).keys()


def held_out_tasks(config: JobConfig, evaluation: int) -> list[Any]:
    assert config.evaluation is not None
    dataset = open_dataset(DatasetSpec.of_evaluation(config.evaluation, config.seed), Path())
    return build_evaluation_tasks(config, evaluation, [dataset.item(i) for i in range(config.evaluation.num_prompts)])


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_held_out_prompts_are_constant_and_never_in_training(seed):
    data = {"type": "reasoning_gym", "task": "chain_sum", "options": {"min_digits": 6, "max_digits": 6}}
    section = {"data": data, "num_prompts": 12, "num_samples_per_prompt": 3, "temperature": 0.5}
    config = job(seed=seed, data=data, evaluation=section)
    first, later = held_out_tasks(config, 0), held_out_tasks(config, 4)
    assert [task.group_id for task in later[:2]] == ["eval-4-0", "eval-4-1"]
    for one, other in zip(first, later, strict=True):
        assert (one.messages, one.seed) == (other.messages, other.seed)
        assert one.reward_context_json == other.reward_context_json
    assert all(task.is_evaluation and task.iteration == 4 for task in later)
    assert (first[0].num_samples, first[0].temperature, first[0].max_response_tokens) == (3, 0.5, 7)
    trained = {task.messages[-1].content for iteration in range(5) for task in tasks_of(config, iteration)}
    assert trained.isdisjoint(task.messages[-1].content for task in first)


def test_held_out_file_is_read_in_its_own_order(tmp_path):
    rows = [json.dumps({"prompt": f"say {i}", "answer": "x"}) for i in range(50)]
    (tmp_path / "held_out.jsonl").write_text("\n".join(rows))
    section = EvaluationConfig.model_validate({"data": {"type": "jsonl", "path": "held_out.jsonl"}, "num_prompts": 3})
    dataset = open_dataset(DatasetSpec.of_evaluation(section, 7), tmp_path)
    assert [dataset.item(i).messages[0].content for i in range(3)] == ["say 0", "say 1", "say 2"]
    more = section.model_copy(update={"num_prompts": 51})
    with pytest.raises(DatasetError, match=r"has 50 rows, and evaluation\.num_prompts is 51; set it to 50 or less"):
        open_dataset(DatasetSpec.of_evaluation(more, 7), tmp_path)


# ---- a hub -------------------------------------------------------------------------------------------------------

CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: data/train.jsonl}
  - {split: test, path: data/test.jsonl}
- config_name: stolen
  data_files: %s
---
"""


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """Write a folder in the layout of a data set on the hub; return the data folder that it is in."""
    root = tmp_path / "org" / "sums"
    (root / "data").mkdir(parents=True)
    (tmp_path / "secret.jsonl").write_text('{"prompt": "?", "answer": "secret"}\n')
    (root / "README.md").write_text(CARD % (tmp_path / "secret.jsonl"))
    write_jsonl(root / "data" / "train.jsonl", ROWS)
    write_jsonl(root / "data" / "test.jsonl", [{"prompt": "held out", "answer": 1072, "level": 0}])
    return tmp_path


def open_hub(data_dir: Path, **options: Any) -> Any:
    data = HubData.model_validate({"type": "hf", "path": "org/sums", "subset": "main"} | options)
    return open_dataset(DatasetSpec(data=data, seed=0, num_items=100), data_dir)


def test_split_is_fetched_once_and_again_if_a_folder_changed(hub_folder, monkeypatch):
    dataset = open_hub(hub_folder, split="test", answer_pattern="0(.+)")
    assert dataset.item(0).context["answer"] == "72"
    kept, lock = sorted((hub_folder / "datasets" / ".hub").iterdir(), reverse=True)
    assert (kept.name.startswith("org-sums-"), lock.name) == (True, "lock")
    with monkeypatch.context() as patch:
        patch.delattr("services.broker.datasets.hub.read_split")
        assert open_hub(hub_folder, split="test").item(0).messages[0].content == "held out"
    write_jsonl(hub_folder / "org" / "sums" / "data" / "test.jsonl", [{"prompt": "new", "answer": 1}])
    assert open_hub(hub_folder, split="test").item(0).messages[0].content == "new"


def test_split_that_another_process_is_fetching_is_taken(hub_folder, monkeypatch):
    open_hub(hub_folder)
    folder = hub_folder / "datasets" / ".hub"
    (kept,) = folder.glob("*.parquet")
    content = kept.read_bytes()
    kept.unlink()
    monkeypatch.delattr("services.broker.datasets.hub.read_split")
    with (folder / "lock").open() as lock, ThreadPoolExecutor() as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        opening = pool.submit(open_hub, hub_folder)
        time.sleep(0.5)
        kept.write_bytes(content)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert opening.result().item(0)


def test_hub_folder_is_found_below_a_relative_data_folder(hub_folder, monkeypatch):
    monkeypatch.chdir(hub_folder.parent)
    assert open_hub(Path(hub_folder.name), split="test").item(0).messages[0].content == "held out"


def test_hub_rows_come_as_those_of_a_file_do(hub_folder):
    write_jsonl(hub_folder / "rows.jsonl", ROWS)
    hub, file = open_hub(hub_folder), open_file(hub_folder)
    assert [hub.item(index) for index in range(25)] == [file.item(index) for index in range(25)]


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"split": "validation"}, "data.split", "has no split 'validation'; it has: train, test"),
        ({"subset": "other"}, "data.path", "BuilderConfig 'other' not found. Available: ['main', 'stolen']"),
        ({"subset": "stolen"}, "data.path", "has a file outside of itself"),
        ({"path": "../org"}, "data.path", "is no hub id"),
        ({"path": "/etc"}, "data.path", "is no hub id"),
        ({"prompt_field": "text"}, "data.prompt_field", "org/sums, row 0 has no 'text'; it has: answer, level, prompt"),
    ],
)
def test_wrong_hub_data_is_refused(hub_folder, options, field, words):
    with pytest.raises(DatasetError) as caught:
        read_all(open_hub(hub_folder, **options))
    assert (caught.value.field, words in caught.value.message) == (field, True), caught.value.message


def test_hub_data_without_the_library_name_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetError, match=r"needs the package `datasets` .* upload it with `onbeat data push`"):
        open_hub(tmp_path)


def test_hub_that_is_not_reachable_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetError, match="org/sums cannot be fetched: "):
        open_hub(tmp_path)


# ---- several processes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"), [(HubData(type="hf", path="a/b"), 1), (FileData(type="jsonl", path="a"), 2)]
)
async def test_files_are_opened_side_by_side_hub_splits_one_by_one(data, expected):
    num_now, most = 0, 0

    class Process:
        async def read(self, *_):
            nonlocal num_now, most
            num_now += 1
            most = max(most, num_now)
            await asyncio.sleep(0.01)
            num_now -= 1
            return [], ""

    pool, spec = DatasetPool([Process(), Process()]), DatasetSpec(data=data, seed=0, num_items=1)
    await asyncio.gather(*(pool.read(spec, 0, 1) for _ in range(4)))
    assert most == expected
