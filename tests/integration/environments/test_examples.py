"""The jobs of examples/ whose environment somebody else serves: each is played on the real server of its example."""

import importlib
import re
from typing import Any

import pytest

from onbeat.environments import Task
from tests.integration.environments.test_openenv import packages, serving
from tests.scripted_session import ScriptedSession, calls, says
from tests.unit.environments.test_examples import ROOT, entries, tasks_of

__all__ = ["packages"]  # a fixture

FOLDER = ROOT / "examples/environments"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def environment_of(example: str) -> tuple[Any, Task]:
    """Return the environment of a job, as the examples' package has it, and the first task of its data."""
    config, tasks = tasks_of(example)
    assert config.environment is not None
    module, _, function = entries("examples/environments/pyproject.toml")[config.environment.name].partition(":")
    return getattr(importlib.import_module(module), function)(), tasks[0]


async def test_mcp_example_multiplies_with_the_servers_tool():
    environment, task = environment_of("mcp")
    a, b = map(int, re.findall(r"\d+", task.question.splitlines()[-1]))
    session = ScriptedSession(calls("multiply", {"a": a, "b": b}), says(f"{a} times {b} is {a * b}."))
    assert (await environment.run(task, session)).reward == 1.0
    assert session.asked[1][-1]["content"] == task.answer == str(a * b)


async def test_openenv_example_rewards_right_words(packages, monkeypatch):
    with serving(FOLDER / "words_server.py", packages) as url:
        monkeypatch.setattr("example_environments.WORDS_URL", url)
        environment, task = environment_of("openenv")
        wrong = ScriptedSession(says("1"), says("no single word"), says(""))
        assert (await environment.run(task, wrong)).reward == 0.0
        letters = [messages[-1]["content"][-2] for messages in wrong.asked]
        right = ScriptedSession(*(says(f"{letter.upper()}bc\n") for letter in letters))
        assert (await environment.run(task, right)).reward == 3.0
