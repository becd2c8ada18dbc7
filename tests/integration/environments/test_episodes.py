"""Whole episodes: processes of environments call the rollout's session server, which records what a policy sampled."""

import json
import os
from pathlib import Path

import pytest

from onbeat.environments.examples.shop import Shop
from onbeat.streams.codec import Environment
from services.rollout.environments import EnvironmentProcesses
from tests import episode_rig
from tests.installed import install

ROOT = Path(__file__).parents[3]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
ENTRIES = """[onbeat.environments]
shop = onbeat.environments.examples.shop:Shop
guess_number = onbeat.environments.examples.guess:GuessNumber
sum = onbeat_sum:Sum
"""
SUM = '''
class Sum:
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def get_reward(self, response: str) -> float:
        return float(response == "4")
'''


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "onbeat_sum", ENTRIES, onbeat_sum=SUM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))


async def group_of(name: str, *texts: str, options: str = "{}", max_turns: int = 4, **fields):
    """Play one episode with a policy that samples these texts. Return the group and what the policy saw."""
    async with episode_rig.playing(None, *texts) as rig:
        processes = EnvironmentProcesses(8, 1024)
        rig.runner._environments = processes
        try:
            limits = {"max_turns": max_turns, "timeout_s": 60.0, "memory_limit_mb": 1024}
            group = await rig.group(environment=Environment(name=name, options_json=options, **limits), **fields)
        finally:
            await processes.close()
        return group, [rig.text(prompt) for prompt, _, _ in rig.engine.seen]


async def test_tool_calls_of_a_class_become_turns():
    group, prompts = await group_of("sum", CALL, "4")
    (response,) = group.responses
    assert response.reward == 1.0
    assert [turn.num_sampled > 0 for turn in response.turns] == [True, True]
    assert "Add two numbers." in prompts[0]
    assert "<tool_response>\n4\n</tool_response>" in prompts[1]
    assert prompts[1].startswith(prompts[0] + CALL)  # what was sampled is kept


async def test_shop_is_played_with_calls_in_the_text():
    shop = Shop()
    shop.reset(["lamp", "cup"], seed=11)
    total = shop.price("lamp") + shop.price("cup")
    context = json.dumps({"question": "?", "answer": ["lamp", "cup"], "metadata": {}})
    options = json.dumps({"tool_calls": "text"})
    texts = ('price("lamp")', 'price("cup")', f"{total} euros.")
    group, _ = await group_of("shop", *texts, options=options, reward_context_json=context)
    (response,) = group.responses
    assert (response.reward, dict(response.reward_parts)) == (1.0, {"looked": 1.0, "right": 1.0})
    assert [turn.parent for turn in response.turns[1:]] == [0, 1]


async def test_game_gives_rewards_to_turns():
    group, prompts = await group_of("guess_number", "10", "1", "x", "y", max_turns=3)
    (response,) = group.responses
    assert len(response.turns) == 3  # then no call is left, and the rewards so far count
    assert response.reward == pytest.approx(sum(turn.reward for turn in response.turns))
    assert "A new game. My number is from 1 to 10." in prompts[0]
    assert "It is from" in prompts[1][len(prompts[0]) :]
