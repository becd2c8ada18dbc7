"""`onbeat reward try` shows what a reward gives, and what the model is asked, with the programs of the services."""

import json
import sys
from pathlib import Path

import pytest

from onbeat.cli import main
from tests.tiny_models import build_tokenizer
from tests.unit.fake_broker import FakeJobs, serve

JOB = """
[model]
path = "{model}"
[data]
type = "jsonl"
path = "rows.jsonl"
[reward]
name = "regex"
options = {{ pattern = '(\\d+)' }}
[rollout]
num_prompts_per_iteration = 2
num_samples_per_prompt = 2
max_response_tokens = 8
[schedule]
num_iterations = 1
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    build_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in (3, 4, 5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.toml").write_text(JOB.format(model=tmp_path / "model"))
    return tmp_path / "job.toml"


def try_reward(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0
) -> str:
    monkeypatch.setattr(sys, "argv", ["onbeat", "reward", "try", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    printed = capsys.readouterr()
    return printed.out + printed.err


def test_reward_of_own_answer_and_of_nothing(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = try_reward(monkeypatch, capsys, str(job), "--rows", "2")
    assert "<|im_start|>user\\n3 + 3 =" in shown
    assert " tokens)" in shown
    assert shown.count("own answer  '6'\n              reward 1\n") == 1
    assert shown.count("empty       ''\n              reward 0\n") == 2
    assert "5 + 5" not in shown


def test_reward_that_fails_says_why(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--set", "reward.options.pattrn=x", "--set", f"model.path={job.parent}/none", "--rows", "1"]
    shown = try_reward(monkeypatch, capsys, str(job), *wrong, code=1)
    assert "the prompts are shown without the model's template" in shown
    assert "failed: TypeError: got an unexpected keyword argument 'pattrn'" in shown
    shown = try_reward(monkeypatch, capsys, str(job), "--set", "data.answer_field=result", code=2)
    assert "data.answer_field" in shown
    assert "has no 'result'" in shown


def test_recorded_samples_are_shown_with_their_rewards(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(FakeJobs()) as url:
        fake_job = ["--job", "job-1", "--url", url]
        monkeypatch.setattr(sys, "argv", ["onbeat", "jobs", "create", str(job), "--url", url])
        with pytest.raises(SystemExit):
            main()
        shown = try_reward(monkeypatch, capsys, str(job), *fake_job)
    assert "reward" in shown
