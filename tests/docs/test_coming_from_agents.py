"""The class of docs/coming-from-agents.md has the shape that both sides take, and works."""

import inspect
import tomllib
from typing import Any

import pytest

from onbeat.config import JobConfig
from onbeat.environments import Task
from onbeat.environments.load import build_environment
from tests.docs.pages import blocks_of
from tests.scripted_session import ScriptedSession, calls, says

PAGE = "docs/coming-from-agents.md"


@pytest.fixture(scope="module")
def letters() -> Any:
    (block,) = [block for block in blocks_of(PAGE) if block.language == "python"]
    namespace: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(block.text, str(block), "exec"), namespace)
    return namespace["Letters"]


@pytest.mark.parametrize(("num_calls", "reward"), [(1, 1.0), (2, 0.9)])
async def test_class_of_the_page_is_played_for_its_reward(letters, num_calls, reward):
    task = Task([{"role": "user", "content": "How many r?"}], "How many r?", "3")
    count = calls("count", {"word": "strawberry", "letter": "r"})
    session = ScriptedSession(*[count] * num_calls, says("Three."))
    outcome = await build_environment(letters, {}).run(task, session)
    assert outcome.reward == pytest.approx(reward)
    assert session.asked[1][-1]["content"] == "3"
    assert [tool["function"]["name"] for tool in session.tools] == ["count"]


def test_trl_can_call_the_same_class(letters):
    instance = letters()
    instance.reset(prompt=[], answer="3")
    assert instance.count(word="strawberry", letter="r") == 3
    assert list(inspect.signature(instance.get_reward).parameters) == []
    assert instance.get_reward() == 1.0


def test_job_of_the_page_is_a_whole_job():
    (block,) = [block for block in blocks_of(PAGE) if block.language == "toml"]
    config = JobConfig.model_validate(tomllib.loads(block.text))
    assert config.environment is not None
    assert (config.environment.name, config.environment.max_turns) == ("letters", 4)
