"""The jobs in examples/ that have an environment: valid, installed, and their data hold what the environment wants."""

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
ENTRIES = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["onbeat.environments"]


@pytest.mark.parametrize("name", ["game", "tools"])
def test_example_plays_its_own_data(name):
    config = JobConfig.model_validate(tomllib.loads((ROOT / f"examples/{name}.toml").read_text()))
    assert config.environment is not None
    module, _, attribute = ENTRIES[config.environment.name].partition(":")
    target = getattr(__import__(module, fromlist=[attribute]), attribute)
    environment = build_environment(target, config.environment.options)
    dataset = open_dataset(DatasetSpec(data=config.data, seed=0, num_items=4), ROOT / "examples")
    for index in range(4):
        item = dataset.item(index)
        messages = [{"role": message.role, "content": message.content} for message in item.messages]
        context = json.loads(json.dumps(item.context))
        task = Task(messages, context["question"], context["answer"], context["metadata"], seed=index)
        session = ScriptedSession(*[says("5")] * config.environment.max_turns)
        outcome = asyncio.run(environment.run(task, session))
        assert 0.0 <= outcome.reward <= 2.0
        assert session.asked
