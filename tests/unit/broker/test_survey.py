"""The look at every row of a job's data before the job is accepted: what is refused, counted and remarked."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from onbeat.config import FileData
from onbeat.contracts.rewards import RewardConfig
from services.broker.datasets import DatasetSpec, Section, Survey
from services.broker.datasets.child import SurveyRequest, answer_survey
from services.broker.datasets.files import FileDataset
from services.broker.datasets.survey import survey

EXACT, MATH = RewardConfig(name="exact"), RewardConfig(name="math")
AS_NUMBER = RewardConfig(name="exact", options={"as_number": True})
PATTERN = RewardConfig(name="regex", options={"pattern": r"(\d+)"})


def open_rows(folder: Path, answers: list[Any], reward: RewardConfig, name: str = "data", **options: Any) -> Any:
    """Write rows with these answers, each with another prompt; an answer may be a whole row."""
    rows = [
        answer if is_row(answer) else {"prompt": f"{number}?", "answer": answer}
        for number, answer in enumerate(answers)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = FileData.model_validate({"type": "jsonl", "path": f"{name}.jsonl"} | options)
    spec = DatasetSpec(data=data, seed=0, num_items=len(rows), is_held_out=name != "data")
    section = Section(field="data" if name == "data" else "evaluation.data", spec=spec, rewards={"reward": reward})
    return section, FileDataset(data, spec, folder)


def test_later_row_without_a_prompt_for_the_teacher_is_refused(tmp_path):
    rows = [{"prompt": "a", "answer": "b", "hint": "c"}, {"prompt": "d", "answer": "e"}]
    section, _ = open_rows(tmp_path, rows, EXACT)
    section.field = "data.1"
    spec = section.spec.model_copy(update={"teacher_prompt_field": "hint"})
    result = survey([(section, FileDataset(spec.data, spec, tmp_path))], time.monotonic() + 60)
    ((field, message),) = result.complaints
    assert (field, message[:32]) == ("teacher.prompt_field", "data.jsonl, line 2 has no 'hint'")


def is_row(answer: Any) -> bool:
    return isinstance(answer, dict) and "prompt" in answer


def look(folder: Path, answers: list[Any], reward: RewardConfig = EXACT, **options: Any) -> Survey:
    return survey([open_rows(folder, answers, reward, **options)], time.monotonic() + 60)


@pytest.mark.parametrize("reward", [EXACT, MATH, PATTERN])
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (["7"], 'has the answer ["7"], which is a list'),
        ([], "has the answer [], which is a list"),
        ({"value": "7"}, 'has the answer {"value": "7"}, which is a mapping'),
        (True, "has the answer true, which is neither text nor a number"),
        (False, "has the answer false, which is neither text nor a number"),
    ],
)
def test_other_kind_in_a_later_row_is_refused_with_its_line(tmp_path, reward, answer, words):
    (complaint,) = look(tmp_path, ["1", "2", answer, "4"], reward).complaints
    assert complaint[0] == "data.answer_field"
    assert complaint[1].startswith(f"data.jsonl, line 3 {words}, and reward {reward.name} compares text")


def test_answer_in_bytes_is_refused_with_its_row(tmp_path):
    table = pyarrow.table({"prompt": ["a", "b"], "answer": [b"42", b"7"]})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    data = FileData(type="parquet", path="rows.parquet")
    spec = DatasetSpec(data=data, seed=0, num_items=2)
    section = Section(field="data", spec=spec, rewards={"reward": EXACT})
    ((field, message),) = survey([(section, FileDataset(data, spec, tmp_path))], time.monotonic() + 60).complaints
    assert field == "data.answer_field"
    assert message.startswith("rows.parquet, row 0 has the answer \"b'42'\", which is bytes, and reward exact compares")


def test_solution_in_a_later_row_is_refused_with_the_pattern(tmp_path):
    ((field, message),) = look(tmp_path, ["1", "3 + 4 = 7\n#### 7", "so\n#### 8"], MATH).complaints
    assert field == "data.answer_pattern"
    assert message.startswith("data.jsonl, line 2 has an answer that ends with '3 + 4 = 7\\n#### 7'")
    assert message.endswith("set it to '#### (.+)' (2 of 3 rows are refused)")
    assert look(tmp_path, ["so\n#### 7", "so\n#### 8"], MATH, answer_pattern="#### (.+)").complaints == []


def test_wrong_row_is_counted_beside_the_right_ones(tmp_path):
    result = look(tmp_path, ["1", "2", "3", {"prompt": "", "answer": "4"}])
    assert result.complaints == [("data.prompt_field", "data.jsonl, line 4 has an empty prompt")]
    assert (result.counts[0].num_accepted, result.counts[0].num_refused) == (3, 1)
    assert result.counts[0].reasons == {"refused: data.prompt_field": 1}


def test_numbers_and_texts_may_stand_side_by_side(tmp_path):
    result = look(tmp_path, [42.0, 1e21, "seven", 7, "8"])
    assert (result.complaints, result.notes) == ([], [])
    (counts,) = result.counts
    assert (counts.num_accepted, counts.num_changed, counts.num_refused) == (5, 3, 0)
    assert counts.reasons == {"the answer is a JSON number, which exact and regex compare as a number": 3}


def test_as_number_refuses_what_is_no_number(tmp_path):
    assert look(tmp_path, ["1,234", "50%", "\N{MINUS SIGN}7", "42.0", 5], AS_NUMBER).complaints == []
    for answer in ("four", "1/2", "5 cm", ""):
        ((field, message),) = look(tmp_path, ["1", answer], AS_NUMBER).complaints
        assert field == "data.answer_field"
        assert message.startswith(f"data.jsonl, line 2 has the answer {answer!r}, which is no number")


@pytest.mark.parametrize(
    ("answers", "note"),
    [
        (
            ["1,234", "5", "6", "7"],
            "25% of the answers in data.jsonl look like numbers with commas, such as '1,234' in line 1",
        ),
        (["5", "6.0", "7.00", "x"], "50% of the answers in data.jsonl end in .0, such as '6.0' in line 2"),
        (["5", "\N{MINUS SIGN}6"], "50% of the answers in data.jsonl have a Unicode minus, such as"),
        (["50%", "60 %"], "100% of the answers in data.jsonl have a percent sign, such as '50%' in line 1"),
        (["1"] * 300 + ["1,000"], "1 of 301 of the answers in data.jsonl look like numbers with commas"),
    ],
)
def test_texts_that_look_like_numbers_are_counted(tmp_path, answers, note):
    for reward in (EXACT, PATTERN):
        (sentence,) = look(tmp_path, answers, reward).notes
        assert sentence.startswith(note)
        assert sentence.endswith("reward compares text; set reward.options.as_number = true to compare numbers")
    for reward in (AS_NUMBER, MATH) if "x" not in answers else (MATH,):
        assert look(tmp_path, answers, reward).notes == []


@pytest.mark.parametrize("answers", [["1,2", "a, b"], ["x.0", "v2.0 of it"], ["100% sure"], [42.0, 43.0]])
def test_other_texts_and_numbers_are_not_counted(tmp_path, answers):
    assert look(tmp_path, answers).notes == []


@pytest.mark.parametrize("answer", ["", " \n"])
def test_empty_answer_is_refused_where_it_is_compared(tmp_path, answer):
    for reward in (EXACT, MATH, PATTERN):
        ((field, message),) = look(tmp_path, ["1", answer], reward).complaints
        assert field == "data.answer_field"
        assert message.startswith(f"data.jsonl, line 2 has an empty answer, which reward {reward.name} cannot compare")
    assert look(tmp_path, ["1", answer], RewardConfig(name="own")).complaints == []


@pytest.mark.parametrize(
    ("answers", "note"),
    [
        (["$42", "7"], "50% of the answers in data.jsonl begin with a currency sign, such as '$42' in line 1"),
        (["\N{FULLWIDTH DIGIT FOUR}2", "7"], "50% of the answers in data.jsonl have digits of another script, such as"),
        (["\N{ZERO WIDTH SPACE}42"], "100% of the answers in data.jsonl have invisible characters, such as"),
        ([r"\boxed{42}"], r"100% of the answers in data.jsonl stand in \boxed{}, such as"),
    ],
)
def test_texts_that_responses_seldom_have_are_counted(tmp_path, answers, note):
    (sentence,) = look(tmp_path, answers).notes
    assert sentence.startswith(note)
    assert sentence.endswith("reward compares text as it stands; data.answer_pattern can take a part of it")
    assert look(tmp_path, answers, MATH).notes == []


def test_gaps_between_digits_are_counted(tmp_path):
    (sentence,) = look(tmp_path, ["1\N{NO-BREAK SPACE}000", "7"]).notes
    assert sentence.startswith("50% of the answers in data.jsonl have gaps between digits, such as")
    assert sentence.endswith("set reward.options.as_number = true to compare numbers")


def test_repeated_prompts_are_counted_with_the_first(tmp_path):
    twice, thrice = {"prompt": "twice?", "answer": "1"}, {"prompt": "thrice?", "answer": "2"}
    (note,) = look(tmp_path, ["1", twice, thrice, twice | {"answer": "3"}, thrice, thrice]).notes
    assert note == "3 of 6 rows in data.jsonl repeat the prompt of an earlier row; the first is line 4, as in line 2"
    assert look(tmp_path, ["1", "1", "1"]).notes == []  # the same answer to other questions


def test_held_out_prompts_in_the_training_data_are_counted(tmp_path):
    shared = {"prompt": "shared?", "answer": "1"}
    training = open_rows(tmp_path, ["1", shared, "3"], EXACT)
    held_out = open_rows(tmp_path, [{"prompt": "own?", "answer": "1"}, shared], EXACT, name="held_out")
    (note,) = survey([training, held_out], time.monotonic() + 60).notes
    assert note.startswith(
        "1 of the 2 held-out prompts of evaluation.data are in the training data, too; the first is "
    )
    assert "the first is line 2, as in line 2" in note
    apart = open_rows(tmp_path, [{"prompt": "own?", "answer": "1"}], EXACT, name="held_out")
    assert survey([training, apart], time.monotonic() + 60).notes == []


def test_held_out_prompts_are_looked_for_in_every_source(tmp_path):
    shared = {"prompt": "shared?", "answer": "1"}
    sources = [open_rows(tmp_path, ["1"], EXACT), open_rows(tmp_path, ["2", shared], EXACT, name="more")]
    for number, (section, _) in enumerate(sources):
        section.field, section.spec = f"data.{number}", section.spec.model_copy(update={"is_held_out": False})
    held_out = open_rows(tmp_path, [shared], EXACT, name="held_out")
    result = survey([*sources, held_out], time.monotonic() + 60)
    assert [count.field for count in result.counts] == ["data.0", "data.1", "evaluation.data"]
    assert result.counts[-1].num_in_training == 1
    assert any("are in the training data of data.1, too" in note for note in result.notes)


def test_field_of_a_held_out_set_is_named(tmp_path):
    held_out = open_rows(tmp_path, ["1", ["7"]], EXACT, name="held_out")
    ((field, _),) = survey([open_rows(tmp_path, ["1"], EXACT), held_out], time.monotonic() + 60).complaints
    assert field == "evaluation.data.answer_field"


def test_rows_that_there_was_no_time_for_are_said(tmp_path):
    result = survey([open_rows(tmp_path, ["1"] * 5, EXACT)], time.monotonic() - 1)
    assert result.notes == ["data.jsonl: only the first 0 of 5 rows could be looked at in time"]
    assert result.counts[0].num_not_looked_at == 5


def test_data_process_answers_with_the_survey(tmp_path):
    section, _ = open_rows(tmp_path, ["1", True], EXACT)
    answer = answer_survey(SurveyRequest(sections=[section], timeout_s=60), tmp_path, {})
    assert [field for field, _ in answer["complaints"]] == ["data.answer_field"]
    assert answer["counts"][0]["num_refused"] == 1


# ---- counts ------------------------------------------------------------------------------------------------------


def test_repeated_and_overlapping_rows_are_in_the_counts(tmp_path):
    shared = {"prompt": "shared?", "answer": "1"}
    training = open_rows(tmp_path, ["1", shared, "3", shared, shared], EXACT)
    held_out = open_rows(tmp_path, [{"prompt": "own?", "answer": "1"}, shared], EXACT, name="held_out")
    counts = survey([training, held_out], time.monotonic() + 60).counts
    assert [(count.num_repeated, count.num_in_training) for count in counts] == [(2, 0), (0, 1)]


def test_changed_messages_are_counted(tmp_path):
    parts = [{"type": "text", "text": "2 "}, {"type": "text", "text": "+ 2?"}]
    prompts = [[{"role": "developer", "content": "Add."}, {"role": "user", "content": parts}]]
    prompts += [[{"role": "user", "content": parts}], [{"role": "user", "content": "2 + 3?"}]]
    (counts,) = look(tmp_path, [{"prompt": prompt, "answer": "4"} for prompt in prompts]).counts
    assert (counts.num_accepted, counts.num_changed) == (3, 2)
    joined, renamed = "parts of text are joined to one content", "the role developer is written as system"
    assert counts.reasons == {joined: 2, renamed: 1}


def test_data_that_cannot_be_opened_do_not_hide_the_others(tmp_path):
    section, _ = open_rows(tmp_path, ["1", True], EXACT)
    held_out, _ = open_rows(tmp_path, ["1"], EXACT, name="held_out")
    (tmp_path / "held_out.jsonl").unlink()
    answer = answer_survey(SurveyRequest(sections=[section, held_out], timeout_s=60), tmp_path, {})
    assert [field for field, _ in answer["complaints"]] == ["evaluation.data.path", "data.answer_field"]


def test_bare_prompts_with_control_tokens_are_counted(tmp_path):
    prompts = ["2 + 2", "<|im_start|>user\n2 + 2<|im_end|>", "[INST] 2 + 2 [/INST]", "a <b> c |> d"]
    rows = [{"prompt": prompt, "answer": "4"} for prompt in prompts]
    (note,) = look(tmp_path, rows, as_chat=False).notes
    assert note.startswith("2 of 4 prompts in data.jsonl hold text like '<|im_start|>' (line 2)")
    assert "set data.control_tokens = 'text'" in note
    assert look(tmp_path, rows, as_chat=False, control_tokens="text").notes == []
    assert look(tmp_path, rows).notes == []  # messages: it is plain text
