"""Environments of pages work as written: they are played with a policy that says what the test wrote."""

import tomllib
from typing import Any

import pytest

from onbeat.environments import Outcome, Task
from onbeat.environments.load import build_environment
from tests.docs.pages import blocks_of
from tests.episode_rig import playing
from tests.scripted_session import ScriptedSession, calls, says

PAGE = "docs/environments.md"
PAGES = (PAGE, "docs/environment-adapters.md", "docs/agents.md")
TASK = Task([{"role": "user", "content": "When did Emma appear?"}], "When did Emma appear?", "1815", seed=1)


def names_of(page: str) -> dict[str, Any]:
    """Return the names that the page's Python defines."""
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for block in blocks_of(page):
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def written() -> dict[str, Any]:
    return {name: value for page in PAGES for name, value in names_of(page).items()}


async def play(target: Any, *answers: dict[str, Any]) -> tuple[Outcome, ScriptedSession]:
    session = ScriptedSession(*answers)
    return await build_environment(target, {}).run(TASK, session), session


async def test_tools_of_the_page(written):
    outcome, session = await play(written["Library"], calls("year", {"title": "Emma"}), says("In 1815."))
    assert outcome == Outcome(1.0, {"looks": 1})
    assert session.asked[1][-1]["content"] == "1815"
    (project,) = [tomllib.loads(b.text) for b in blocks_of(PAGE) if b.text.startswith("# its pyproject.toml")]
    assert project["project"]["entry-points"] == {"onbeat.environments": {"library": "library:Library"}}


async def test_game_of_the_page(written):
    outcome, _ = await play(written["Riddle"], says("A stone?"), says("An echo!"))
    assert outcome.reward == pytest.approx(0.8)


async def test_python_tool_of_the_page(written):
    outcome, session = await play(written["Programmer"], calls("run_code", {"code": "print(6 * 7)"}), says("42"))
    assert session.asked[1][-1]["content"] == "42\n"
    assert outcome.reward == 1.0


async def test_agent_of_the_page_plays_behind_a_url(written):
    async with playing(build_environment(written["Agent"], {}).run, "Let me think.", "It was 4.") as rig:
        (response,) = (await rig.group()).responses
    assert (response.reward, dict(response.reward_parts)) == (1.0, {"length": 9.0})
    assert response.turns[1].parent == 0  # the client's next messages continue the first answer


def test_servers_of_the_page_are_environments(written):
    for name in ("calculator", "wordle"):
        assert hasattr(build_environment(written[name], {}), "run")


@pytest.mark.parametrize(("num_calls", "reward"), [(1, 1.0), (2, 0.9)])
async def test_class_for_trl_and_onbeat_is_played_for_its_reward(num_calls, reward):
    letters = names_of("docs/agents.md")["Letters"]
    task = Task([{"role": "user", "content": "How many r?"}], "How many r?", "3")
    session = ScriptedSession(*[calls("count", {"word": "strawberry", "letter": "r"})] * num_calls, says("Three."))
    outcome = await build_environment(letters, {}).run(task, session)
    assert outcome.reward == pytest.approx(reward)
    assert session.asked[1][-1]["content"] == "3"
    assert [tool["function"]["name"] for tool in session.tools] == ["count"]
    instance = letters()  # as TRL calls it
    instance.reset(prompt=[], answer="3")
    assert instance.count(word="strawberry", letter="r") == 3
    assert instance.get_reward() == 1.0
