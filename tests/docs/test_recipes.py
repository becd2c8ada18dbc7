"""The story of docs/recipes.md, run from its first command to its last on the bundled model, with few prompts."""

import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.conftest import free_port
from tests.docs.pages import ROOT
from tests.docs.shell import Command
from tests.docs.test_commands import commands_of_page

pytestmark = pytest.mark.rare

SHORT = ["schedule.num_iterations=2", "rollout.num_prompts_per_iteration=4", "evaluation.num_prompts=2"]
WARM = ["schedule.num_iterations=6", "rollout.num_prompts_per_iteration=4"]  # four of examples; all prompts at its gate
JOB = re.compile(r"job-[0-9a-f]{12}")
STEP_S, START_S = 600, 240


class Story:
    """The folder in which the story is run, and the newest job in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job, self.port = folder, "", free_port()
        self.environment = os.environ | {"PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "PWD": str(folder)}
        self.environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}

    def words(self, command: Command) -> list[str]:
        text = [word.replace("$PWD", str(self.folder)).replace("8001", str(self.port)) for word in command.words]
        text = [self.job if word == "JOB" else word for word in text]
        values = WARM if "examples/warm_start.toml" in text else SHORT
        shorter = ["--engine=transformers", *(f"--set={value}" for value in values)]  # vLLM takes long to start
        return [*text, *shorter] if text[:2] == ["onbeat", "run"] else text

    def run(self, command: Command) -> str:
        done = subprocess.run(
            self.words(command),
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        if jobs := JOB.findall(done.stdout):
            self.job = jobs[-1]
        return done.stdout

    def serve(self, command: Command) -> subprocess.Popen[bytes]:
        """Start a server, and wait until it answers."""
        with (self.folder / "server.log").open("wb") as log:
            server = subprocess.Popen(
                self.words(command), cwd=self.folder, env=self.environment, stdout=log, stderr=subprocess.STDOUT
            )
        deadline = time.monotonic() + START_S
        while not self.is_served():
            assert server.poll() is None, (self.folder / "server.log").read_text(encoding="utf-8")
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text(encoding="utf-8")
            time.sleep(0.5)
        return server

    def is_served(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False).status_code == 200
        except httpx.TransportError:
            return False


@pytest.mark.timeout(1800)
def test_story_runs_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    story, server, printed = Story(tmp_path), None, []
    try:
        for command in commands_of_page("docs/recipes.md"):
            if "vllm.entrypoints.openai.api_server" in command.words:
                server = story.serve(command)
            else:
                printed.append(story.run(command))
    finally:
        if server is not None:
            server.terminate()
            server.wait(60)
    assert sum("SUCCEEDED" in text for text in printed) == 3
    assert sum("clean" in text for text in printed) >= 3
    answer = json.loads(printed[-1])["choices"][0]["message"]["content"]
    assert answer.strip()
