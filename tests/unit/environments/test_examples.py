"""The jobs in examples/ that have an environment: installed, and their data hold what the environment wants."""

import asyncio
import json
import tomllib
from pathlib import Path

import pytest

from onbeat.config import JobConfig
from onbeat.environments import Task
from onbeat.environments.load import build_environment
from services.broker.datasets import DatasetSpec
from services.broker.datasets.child import open_dataset
from tests.scripted_session import ScriptedSession, says

ROOT = Path(__file__).parents[3]


def entries(project: str) -> dict[str, str]:
    """Return the environments that a project installs, by name."""
    return tomllib.loads((ROOT / project).read_text())["project"]["entry-points"]["onbeat.environments"]


def tasks_of(example: str) -> tuple[JobConfig, list[Task]]:
    """Return a job of examples/ and the tasks of its first four prompts."""
    config = JobConfig.from_file(ROOT / f"examples/{example}.toml")
    dataset = open_dataset(DatasetSpec(data=config.data, seed=0, num_items=4), ROOT / "examples")
    tasks = []
    for index, item in enumerate(map(dataset.item, range(4))):
        messages = [{"role": message.role, "content": message.content} for message in item.messages]
        context = json.loads(json.dumps(item.context))
        tasks.append(Task(messages, context["question"], context["answer"], context["metadata"], seed=index))
    return config, tasks


@pytest.mark.parametrize("name", ["game", "tools"])
def test_example_plays_its_own_data(name):
    config, tasks = tasks_of(name)
    assert config.environment is not None
    module, _, attribute = entries("pyproject.toml")[config.environment.name].partition(":")
    environment = build_environment(
        getattr(__import__(module, fromlist=[attribute]), attribute), config.environment.options
    )
    for task in tasks:
        session = ScriptedSession(*[says("5")] * config.environment.max_turns)
        outcome = asyncio.run(environment.run(task, session))
        assert 0.0 <= outcome.reward <= 2.0
        assert session.asked
