"""A whole episode: the process of an environment calls the rollout's session server, which records what was sampled."""

import os
from pathlib import Path

from onbeat.streams.codec import Environment
from services.rollout.environments import EnvironmentProcesses
from services.rollout.episodes.contract import Program
from tests import episode_rig
from tests.installed import install

ROOT = Path(__file__).parents[3]
SUM = '''
class Sum:
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def get_reward(self, response: str) -> float:
        return float(response == "4")
'''


async def test_tool_calls_of_a_class_become_turns(tmp_path, monkeypatch):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    install(tmp_path, "onbeat_sum", "[onbeat.environments]\nsum = onbeat_sum:Sum\n", onbeat_sum=SUM)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    environment = Environment(name="sum", options_json="{}", max_turns=4, timeout_s=60.0, memory_limit_mb=1024)
    async with episode_rig.playing(None, call, "4") as rig:
        processes = rig.runner._environments = EnvironmentProcesses(8, [Program("sum", "{}", 1024)])
        try:
            group = await rig.group(environment=environment)
        finally:
            await processes.close()
    (response,) = group.responses
    assert response.reward == 1.0
    assert [turn.num_sampled > 0 for turn in response.turns] == [True, True]
    first, second = (rig.text(prompt) for prompt, _, _ in rig.engine.seen)
    assert "Add two numbers." in first
    assert "<tool_response>\n4\n</tool_response>" in second
    assert second.startswith(first + call)  # the sampled text is kept
