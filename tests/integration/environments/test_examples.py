"""The jobs in examples/ that have an environment: each is installed and plays its own data, on the real server of its
example where somebody else serves it."""

import importlib
import json
import re
import tomllib
from pathlib import Path

import pytest

from onbeat.config import JobConfig
from onbeat.environments import Environment, Task
from onbeat.environments.load import build_environment
from services.broker.datasets import DatasetSpec
from services.broker.datasets.child import open_dataset
from tests.integration.environments.test_openenv import packages, serving
from tests.scripted_session import ScriptedSession, calls, says

pytestmark = pytest.mark.slow

__all__ = ["packages"]  # a fixture

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples/environments"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def environment_of(example: str, project: str = "examples/environments") -> tuple[Environment, list[Task]]:
    """Return the environment of a job, as the project installs it, and the first four tasks of the job's data."""
    config = JobConfig.from_file(ROOT / f"examples/{example}.toml")
    assert config.environment is not None
    installed = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, attribute = installed["onbeat.environments"][config.environment.name].partition(":")
    target = getattr(importlib.import_module(module), attribute)
    dataset = open_dataset(DatasetSpec(data=config.data, seed=0, num_items=4), ROOT / "examples")
    tasks = []
    for index, item in enumerate(map(dataset.item, range(4))):
        messages = [{"role": message.role, "content": message.content} for message in item.messages]
        context = json.loads(json.dumps(item.context))
        tasks.append(Task(messages, context["question"], context["answer"], context["metadata"], seed=index))
    return build_environment(target, config.environment.options), tasks


@pytest.mark.parametrize("name", ["game", "tools"])
async def test_example_plays_its_own_data(name):
    environment, tasks = environment_of(name, ".")
    for task in tasks:
        session = ScriptedSession(*[says("5")] * 4)
        outcome = await environment.run(task, session)
        assert 0.0 <= outcome.reward <= 2.0
        assert session.asked


async def test_mcp_example_multiplies_with_the_servers_tool():
    environment, (task, *_) = environment_of("mcp")
    a, b = map(int, re.findall(r"\d+", task.question.splitlines()[-1]))
    session = ScriptedSession(calls("multiply", {"a": a, "b": b}), says(f"{a} times {b} is {a * b}."))
    assert (await environment.run(task, session)).reward == 1.0
    assert session.asked[1][-1]["content"] == task.answer == str(a * b)


async def test_openenv_example_rewards_right_words(packages, monkeypatch):
    with serving(FOLDER / "words_server.py", packages) as url:
        monkeypatch.setattr("example_environments.WORDS_URL", url)
        environment, (task, *_) = environment_of("openenv")
        wrong = ScriptedSession(says("1"), says("no single word"), says(""))
        assert (await environment.run(task, wrong)).reward == 0.0
        letters = [messages[-1]["content"][-2] for messages in wrong.asked]
        right = ScriptedSession(*(says(f"{letter.upper()}bc\n") for letter in letters))
        assert (await environment.run(task, right)).reward == 3.0
