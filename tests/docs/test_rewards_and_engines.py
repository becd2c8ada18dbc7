"""Packages that docs/rewards.md, objectives.md and engines.md show work as written: installed, and in a real job."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest

from onbeat.contracts.states import JobState
from services.rollout.rewards.judge_questions import QUESTIONS, Completion, messages_of
from services.rollout.settings import Settings as RolloutSettings
from tests.docs.pages import blocks_of, text_of
from tests.docs.test_snippets import quickstart_with
from tests.e2e.stack import tiny_job

pytestmark = pytest.mark.slow

RUN_S = 150.0


def block_after(page: str, language: str, start: str) -> str:
    (text,) = [block.text for block in blocks_of(page) if block.language == language and block.text.startswith(start)]
    return text


def install(page: str, module: str, folder: Path) -> None:
    """Install the page's module and its pyproject.toml, as `pip install` does, into a folder of the tests."""
    package = folder / f"source-of-{module}"
    package.mkdir()
    (package / module).write_text(block_after(page, "python", f"# {module}"))
    (package / "pyproject.toml").write_text(block_after(page, "toml", "# its pyproject.toml"))
    offline = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--target", str(folder / "installed")]
    command = [sys.executable, "-m", "pip", "install", *offline, str(package)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_own_reward_scores_a_job(workplace):
    install("docs/rewards.md", "brevity.py", workplace.folder)
    section = tomllib.loads(block_after("docs/rewards.md", "toml", '[reward]\nname = "brevity"'))
    job = quickstart_with(section | {"model": {"path": str(workplace.folder / "model"), "dtype": "float32"}})
    job["schedule"] = {"num_iterations": 1}
    job["rollout"] |= {"truncated": "score"}
    created = workplace.stack.client.jobs.create(job)
    assert workplace.stack.wait(created.id).state is JobState.SUCCEEDED
    samples = workplace.stack.client.jobs.samples(created.id)
    assert samples
    for sample in samples:
        assert {"right", "short"} <= sample.reward_parts.keys()
        assert sample.reward == pytest.approx(sample.reward_parts["right"] + 0.1 * sample.reward_parts["short"])


def test_own_objective_trains_a_job(workplace):
    install("docs/objectives.md", "lenient.py", workplace.folder)
    section = tomllib.loads(block_after("docs/objectives.md", "toml", "[objective]"))
    job = tiny_job(workplace.folder, schedule={"num_iterations": 1}) | section
    created = workplace.stack.client.jobs.create(job)
    assert created.config["objective"]["below"] == 0.25
    assert workplace.stack.wait(created.id).state is JobState.SUCCEEDED
    (iteration,) = workplace.stack.client.jobs.iterations(created.id)
    assert iteration.metrics["train/trained_tokens"] > 0


async def test_own_reward_service_answers_as_described():
    namespace: dict[str, Any] = {}
    exec(block_after("docs/rewards.md", "python", "# judge.py"), namespace)
    request, answer = re.findall(r"^(?:->|<-) (.*)$", text_of("docs/rewards.md"), re.M)
    transport = httpx.ASGITransport(app=namespace["app"])
    async with httpx.AsyncClient(transport=transport, base_url="http://judge") as client:
        response = await client.post("/score", json=json.loads(request))
    assert len(response.json()["scores"]) == len(json.loads(answer)["scores"]) == len(json.loads(request)["responses"])


def test_judge_without_a_model_prefers_the_shorter_response():
    namespace: dict[str, Any] = {}
    exec(block_after("docs/rewards.md", "python", "# shorter.py"), namespace)
    for pair, better in ((["four", "six letters"], 1), (["fourteen", "six"], 2), (["one", "two"], 0)):
        messages = messages_of(QUESTIONS["pairs"], "Is it short?", {"question": "How much?"}, pair)
        completion = Completion.model_validate(namespace["complete"]({"messages": messages}))
        assert QUESTIONS["pairs"].answer.model_validate_json(completion.choices[0].message.content).better == better


def test_settings_of_reward_services_are_such(monkeypatch):
    service, judge = re.findall(r"^ONBEAT_REWARD_SERVICES='(.*)'$", text_of("docs/rewards.md"), re.M)
    monkeypatch.setenv("ONBEAT_REWARD_SERVICES", service)
    assert RolloutSettings().reward_services["judge"].model == ""
    monkeypatch.setenv("ONBEAT_REWARD_SERVICES", judge)
    assert RolloutSettings().reward_services["grader"].model


def test_own_engine_trains_a_job(workplace, tmp_path):
    """The log-probabilities and weights of the engine are the trainer's: in float32 the gap is rounding."""
    install("docs/engines.md", "plain_engine.py", workplace.folder)
    folder = workplace.folder_of("docs/engines.md")
    command = block_after("docs/engines.md", "sh", "onbeat run").split()
    command += ["--report", str(tmp_path / "report.json"), "--data-dir", str(tmp_path / "data")]
    command += ["--set", "rollout.num_prompts_per_iteration=2", "--set", "rollout.max_response_tokens=12"]
    # A step that moves the weights: an engine that did not load them would differ far more than by rounding.
    command += ["--set", 'reward={ name = "regex", options = { pattern = "[0-9a-m]" } }']
    command += ["--set", "optimizer.learning_rate=0.01"]
    done = subprocess.run(
        [sys.executable, "-m", "onbeat.cli", *command[1:]],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("ONBEAT_")},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["iterations"]) == 2  # the second one on weights that were loaded
    assert all(0 <= iteration["mismatch_max"] < 1e-3 for iteration in report["iterations"])
    assert all(iteration["metrics"]["train/trained_tokens"] > 0 for iteration in report["iterations"])
