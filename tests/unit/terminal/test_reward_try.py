"""`onbeat reward try` shows what a reward gives, and what the model is asked, with the programs of the services."""

import json
from pathlib import Path

import pytest

from onbeat.cli.reward import lesson_of
from onbeat.contracts.records import Sample
from onbeat.streams.signal import Signal
from tests.installed import install
from tests.tiny_models import build_tokenizer
from tests.unit.terminal.conftest import Command

pytestmark = pytest.mark.slow

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


def test_reward_of_own_answer_and_of_nothing(job: Path, onbeat: Command) -> None:
    shown = onbeat("reward", "try", str(job), "--rows", "2").out
    assert "<|im_start|>user\\n3 + 3 =" in shown
    assert " tokens)" in shown
    assert shown.count("own answer  '6'\n              reward 1\n") == 1
    assert shown.count("empty       ''\n              reward 0\n") == 2
    assert "5 + 5" not in shown


def test_reward_that_fails_says_why(job: Path, onbeat: Command) -> None:
    wrong = ["--set", "reward.options.pattrn=x", "--set", f"model.path={job.parent}/none", "--rows", "1"]
    shown = onbeat("reward", "try", str(job), *wrong, code=1).out
    assert "the prompts are shown without the model's template" in shown
    assert "failed: TypeError: got an unexpected keyword argument 'pattrn'" in shown
    error = onbeat("reward", "try", str(job), "--set", "data.answer_field=result", code=2).err
    assert "data.answer_field" in error
    assert "has no 'result'" in error


def test_recorded_samples_are_shown_with_their_rewards(job: Path, onbeat: Command, trained: str) -> None:
    shown = onbeat("reward", "try", str(job), "--job", trained, "--rows", "1").out
    assert "reward 0.2" in shown
    assert shown.count("response 0 ") == shown.count("teaches  ") == 1
    assert "teaches     nothing: equal rewards" in shown


@pytest.mark.parametrize(
    ("signal", "lesson"),
    [
        (Signal(), "which of these responses are better"),
        (Signal("part:right"), "nothing: no signal (objective.signal = part:right)"),
        (Signal("solved", 0.1), "which of these responses are better"),
    ],
)
def test_lesson_of_a_group_is_that_of_its_signal(signal: Signal, lesson: str) -> None:
    given: list[tuple[float | None, float]] = [(0.1, 0.0), (0.0, 0.0), (None, 1.0)]
    samples = [
        Sample(
            iteration=0,
            group_id="0-0",
            policy_version=0,
            prompt="3 + 3 =",
            response="6",
            reward=reward,
            reward_parts={} if reward is None else {"right": right},
            num_tokens=1,
            finish_reason="stop",
        )
        for reward, right in given
    ]
    assert lesson_of(samples, signal) == lesson


def test_reward_that_never_ends_is_named_in_time(job: Path, onbeat: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.cli.reward.START_S", 15.0)
    (job.parent / "rows.jsonl").write_text(json.dumps({"prompt": "3 =", "answer": "a" * 40 + "!"}) + "\n")
    slow = ["--set", 'reward.options.pattern="(a+)+$"', "--set", "reward.timeout_s=0.5"]
    shown = onbeat("reward", "try", str(job), *slow, code=1).out
    assert "no score: it took longer than timeout_s = 0.5, or the scoring process ended" in shown


def test_solution_is_refused_as_by_the_broker(job: Path, onbeat: Command) -> None:
    rows = [{"prompt": "3 + 4 =", "answer": "7"}, {"prompt": "How many?", "answer": "3 + 4 = 7\n#### 7"}]
    (job.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    error = onbeat("reward", "try", str(job), "--set", "reward={name = 'math'}", "--rows", "1", code=2).err
    assert "data.answer_pattern" in error
    assert "line 2 has an answer that ends with" in error
    assert "set it to '#### (.+)'" in error


def test_own_answer_with_reward_0_gets_a_remark(job: Path, onbeat: Command) -> None:
    strict = ["--set", "reward.options.pattern='<answer>(.*)</answer>'", "--rows", "1"]
    shown = onbeat("reward", "try", str(job), *strict).out
    assert "remark: the reward gives a row's own answer 0; correct the options or the data" in shown
    assert "remark" not in onbeat("reward", "try", str(job), "--rows", "1").out


def test_commas_in_answers_are_said_before_a_job(job: Path, onbeat: Command) -> None:
    (job.parent / "rows.jsonl").write_text(json.dumps({"prompt": "3 =", "answer": "1,234"}) + "\n")
    shown = onbeat("reward", "try", str(job)).out
    assert "note: 100% of the answers in" in shown
    assert "set reward.options.as_number = true" in shown


def test_prompt_that_opens_the_reasoning_gets_a_note(job: Path, onbeat: Command) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    (job.parent / "opens.jinja").write_text(template)
    options = ["--set", "model.chat_template_file=opens.jinja", "--rows", "1"]
    shown = onbeat("reward", "try", str(job), *options).out
    assert "note: prompts end with <think>, which is no part of a response" in shown
    assert "3 + 3 =<|im_start|>assistant\\n<think>" in shown
    assert "note: prompts end" not in onbeat("reward", "try", str(job), "--rows", "1").out


def test_group_reward_compares_the_responses_to_a_row(
    job: Path, onbeat: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def rank(responses, context):\n    return [sorted(responses).index(text) / 2 for text in responses]\n"
    install(job.parent / "site", "ranks", "[onbeat.rewards]\nrank = ranks:rank\n", ranks=code)
    monkeypatch.setenv("PYTHONPATH", str(job.parent / "site"))
    shown = onbeat("reward", "try", str(job), "--set", "reward={name = 'rank'}", "--rows", "1").out
    assert "own answer  '6'\n              reward 0.5\n" in shown
    assert "empty       ''\n              reward 0\n" in shown


def test_job_of_examples_has_no_reward_to_try(tmp_path: Path, onbeat: Command) -> None:
    start = {"data": {"type": "jsonl", "path": "rows.jsonl"}, "num_rows_per_iteration": 1}
    sft = {"model": {"path": "./mine"}, "objective": {"type": "sft"}, "warm_start": start}
    (tmp_path / "job.json").write_text(json.dumps(sft | {"schedule": {"num_iterations": 1}}), encoding="utf-8")
    error = onbeat("reward", "try", str(tmp_path / "job.json"), code=2).err
    assert "sft learns from examples, which get no reward; to try the rewards of its [evaluation], write a job" in error
