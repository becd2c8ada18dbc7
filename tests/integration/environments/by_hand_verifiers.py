"""Episodes of the package `verifiers`: `pytest tests/integration/environments/by_hand_verifiers.py`.

It is not among the tests that run by themselves: the package needs 600 MB in a virtual environment of its own, which
this makes in `.venv`, and its programs install further packages when they start. The policy is scripted.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onbeat.environments.verifiers import write_tasks
from onbeat.streams.codec import Environment
from services.rollout.environments import EnvironmentProcesses
from services.rollout.episodes.contract import Program
from services.rollout.episodes.runner import EnvironmentFailed
from tests import episode_rig
from tests.installed import install as install_package
from tests.integration.environments.test_openenv import packages, url

__all__ = ["packages", "url"]  # fixtures

pytestmark = pytest.mark.timeout(1800)

ROOT = Path(__file__).parents[3]
REQUIREMENTS = ["verifiers[openenv]==0.4.0", "uv==0.13.9"]
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}

SUMS = '''
import asyncio
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: int

class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

class Options(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()
    end: str = "well"

class Sum(vf.Task[Data, vf.State, Options]):
    @classmethod
    def toolsets(cls, config: Options) -> list[vf.Toolset]:
        return [Calculator(config.tools)]

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if self.config.end == "raise":
            raise ConnectionError("the judge is gone")
        if self.config.end == "wait":
            await asyncio.sleep(3600)
        return float(trace.last_reply == str(self.data.answer))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)

class Config(vf.TasksetConfig):
    task: Options = Options()

class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for n in range(5):
            yield Sum(Data(prompt=f"{n} + {n} =", answer=2 * n), self.config.task)

__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
'''

INSTALLED = """
import json, sys
from onbeat.environments.verifiers import VerifiersEnvironment

def played(config):
    return VerifiersEnvironment({python!r}, json.loads(config))
"""


@pytest.fixture(scope="module")
def python() -> str:
    """Return the Python of a virtual environment with verifiers and the taskset, which is made once."""
    folder = ROOT / ".venv" / f"verifiers-{hashlib.sha256(' '.join(REQUIREMENTS).encode()).hexdigest()[:12]}"
    interpreter = folder / "bin/python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *REQUIREMENTS], check=True)
        (folder / "complete").touch()
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "sums.py").write_text(SUMS)
    shutil.copy(ROOT / "examples/environments/doubles.py", site)
    return str(interpreter)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str) -> None:
    entry = "[onbeat.environments]\nplayed = onbeat_played:played\n"
    install_package(tmp_path, "onbeat_played", entry, onbeat_played=INSTALLED.format(python=python))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements/install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    settings = install.pip_settings()  # verifiers' programs take packages with uv, which does not read them
    for option, variable in install.UV_VARIABLES.items():
        if option in settings:
            joined = ("," if option == "find-links" else " ").join(settings[option].split())
            monkeypatch.setenv(variable, joined)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def group_of(python: str, config: dict, *texts: str, timeout_s: float = 300.0, max_turns: int = 8, **fields):
    """Play the third task of a taskset, or the only one, with a policy that samples these texts."""
    path = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]) / "tasks.jsonl"
    write_tasks(python, config, str(path), 3)
    row = json.loads(path.read_text().splitlines()[-1])
    context = json.dumps({"question": row["prompt"], "answer": "", "metadata": {"task": row["task"]}})
    async with episode_rig.playing(None, *texts, template=episode_rig.QWEN_LIKE) as rig:
        options = json.dumps({"config": json.dumps(config)})
        processes = EnvironmentProcesses(8, [Program("played", options, 2048)])
        rig.runner._environments = processes
        try:
            limits = {"max_turns": max_turns, "timeout_s": timeout_s, "memory_limit_mb": 2048}
            environment = Environment(name="played", options_json=options, **limits)
            group = await rig.group(environment=environment, reward_context_json=context, deadline_s=1200.0, **fields)
        finally:
            await processes.close()
        return group, [rig.text(prompt) for prompt, _, _ in rig.engine.seen]


def sums(end: str = "well", **agent: object) -> dict:
    return {"taskset": {"id": "sums", "task": {"end": end}}, "agent": AGENT | agent}


async def test_tools_of_a_taskset_become_turns(python):
    group, prompts = await group_of(python, sums(), call("calculator_add", a=2, b=2), "4")
    (response,) = group.responses
    assert response.reward == 2.0
    assert dict(response.reward_parts) == {"right": 2.0, "length": 1.0}
    assert [turn.parent for turn in response.turns[1:]] == [0]
    assert "Add two numbers." in prompts[0]
    assert prompts[1].startswith(prompts[0])
    assert "<tool_response>\n4\n</tool_response>" in prompts[1]


async def test_example_has_the_tasks_of_its_taskset(python, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples/environments"))
    config = importlib.import_module("example_environments").DOUBLES
    write_tasks(python, config, str(tmp_path / "tasks.jsonl"), 100)
    assert (tmp_path / "tasks.jsonl").read_text() == (ROOT / "examples/verifiers.jsonl").read_text()
    group, _ = await group_of(python, config, "It is 8", "9", num_samples=2)  # the third task: 4 + 4
    assert sorted(response.reward for response in group.responses) == [0.0, 1.0]


async def test_openenv_taskset_is_played(python, url):
    config = {"taskset": {"id": "openenv", "base_url": url, "resets": [{"seed": 3}]}, "player": AGENT}
    group, prompts = await group_of(python, config, "a", '{"message": "bb"}', "ccc", "never asked")
    assert group.responses[0].reward == pytest.approx(0.6)
    assert "seed 3" in prompts[0]
    assert len(prompts) == 3


@pytest.mark.parametrize(("config", "max_turns"), [(sums(), 1), (sums(max_turns=1), 8)])
async def test_episode_without_a_turn_left_gets_its_reward(python, config, max_turns):
    group, prompts = await group_of(python, config, call("calculator_add", a=2, b=2), max_turns=max_turns)
    assert (group.responses[0].reward, len(prompts)) == (0.0, 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [(sums("raise"), "the judge is gone"), (sums("wait", timeout={"scoring": 1.0}), "scoring_timeout")],
)
async def test_what_is_no_reward_fails_the_episode(python, config, words):
    with pytest.raises(EnvironmentFailed, match=words):
        await group_of(python, config, *["4"] * 8)


async def test_episode_that_takes_too_long_is_cancelled(python):
    with pytest.raises(EnvironmentFailed, match="timeout: "):
        await group_of(python, sums("wait"), "4", "4", timeout_s=60.0)
    assert num_players() == 0


def num_players() -> int:
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return listed.stdout.count("verifiers_player.py")
