"""The data that come with Onbeat, and what the quick start makes of them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from onbeat.client.datasets import take_local_files
from onbeat.config import FileData, JobConfig
from onbeat.config.files import read_job_file
from services.broker.datasets import DatasetError
from services.broker.datasets.bundled.make_sums import make_files
from services.broker.datasets.files import resolve_path
from services.rollout.rewards.builtin import regex

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart.toml"
JOB = JobConfig.from_file(QUICKSTART)
SUM = re.compile(r"Calculate (\d) ([a-z]+) \+ (\d) \2\.")


def rows_of(data: Any, data_dir: Path) -> dict[str, str]:
    """Return the answers by prompt."""
    assert isinstance(data, FileData)
    lines = resolve_path(data.path, data_dir).read_text(encoding="utf-8").splitlines()
    rows = {row["prompt"]: row["answer"] for row in map(json.loads, lines)}
    assert len(rows) == len(lines), "a prompt is there twice"
    return rows


def things_of(rows: dict[str, str]) -> set[str]:
    sums = {prompt: SUM.fullmatch(prompt) for prompt in rows}
    assert all(match and int(match[1]) + int(match[3]) == int(rows[prompt]) for prompt, match in sums.items())
    return {match[2] for match in sums.values() if match}


def test_no_held_out_question_of_the_quick_start_is_trained(tmp_path: Path) -> None:
    (held_out,) = JOB.held_out
    trained, asked = rows_of(JOB.data, tmp_path), rows_of(held_out.data, tmp_path)
    assert len(trained) >= 2000
    assert (len(asked), held_out.num_prompts) == (64, 64)
    assert not trained.keys() & asked.keys()
    assert not things_of(trained) & things_of(asked)
    assert JOB.data.system_prompt == held_out.data.system_prompt


def test_files_are_what_their_maker_writes(tmp_path: Path) -> None:
    for name, text in make_files().items():
        assert resolve_path(f"bundled:{name}", tmp_path).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("name", ["bundled:", "bundled:nothing.jsonl", "bundled:../files.py", "bundled:make_sums.py"])
def test_a_missing_bundled_file_is_refused_with_those_there_are(name: str, tmp_path: Path) -> None:
    known = "there is: bundled:sums-held-out.jsonl, bundled:sums.jsonl"
    with pytest.raises(DatasetError, match=known):
        resolve_path(name, tmp_path)


def test_nothing_is_uploaded_for_the_quick_start(tmp_path: Path) -> None:
    job = read_job_file(QUICKSTART, [])
    assert take_local_files(job, QUICKSTART.parent, data_dir=tmp_path) == []
    assert job == read_job_file(QUICKSTART, [])


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("14", 1.0),
        ("5 + 9 = 14", 1.0),
        ("5 + 9 = 14.", 1.0),
        ("5 apples + 9 apples = 14 apples.", 1.0),
        ("5 + 9 = 13", 0.0),
        ("5 + 9 = 14\n\nThe answer is 14", 0.0),
        ("+4 + 8 == 4 + 14", 0.0),
        ("I have 5 apples, 9 apples and 14", 0.0),
        ("", 0.0),
    ],
)
def test_the_quick_start_pays_whole_answers_alone(response: str, reward: float) -> None:
    (config,) = JOB.rewards
    assert regex(response, {"answer": "14"}, **config.options) == reward
