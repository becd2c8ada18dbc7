"""A real local stack on a tiny model, and folders in which pages find what they name."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest

from onbeat.client import DEFAULT_URL
from onbeat.contracts.states import JobState
from tests.docs.pages import ROOT
from tests.e2e.stack import RunningStack, running, tiny_job
from tests.tiny_models import write_tied_model
from tests.waiting import wait_until

BUNDLED = "bundled:smollm2-135m-instruct"


@dataclass(frozen=True)
class Workplace:
    """Workplace in which a page's commands and snippets run."""

    stack: RunningStack
    folder: Path  # folder of the tests: installed/, model/, one folder for each page
    finished: str  # a job that SUCCEEDED

    def folder_of(self, page: str) -> Path:
        """Make a folder with the repository's examples/, but with the tiny model and short."""
        folder = self.folder / page.replace("/", "-")
        if not folder.exists():
            shutil.copytree(ROOT / "examples", folder / "examples")
            for job in (folder / "examples").glob("*.toml"):
                job.write_text(self.shortened(job.read_text()))
        return folder

    def shortened(self, text: str) -> str:
        """Shorten a job, a command or a snippet to two iterations, and to the tiny model with two layers."""
        text = text.replace(f'path = "{BUNDLED}"', f'path = "{self.folder / "model"}"\ndtype = "float32"')
        text = text.replace("max_context_tokens = 96", "max_context_tokens = 256")  # tokens are characters here
        text = re.sub(r"num_iterations ?= ?\d+", lambda match: re.sub(r"\d+", "2", match[0]), text)
        text = text.replace('"num_hidden_layers": 28', '"num_hidden_layers": 2')
        return text.replace(DEFAULT_URL, self.stack.url)

    def new_job(self, num_iterations: int) -> str:
        job = tiny_job(self.folder, schedule={"num_iterations": num_iterations})
        return self.stack.client.jobs.create(job).id

    def job_in(self, state: JobState) -> str:
        """Create a job and bring it to this state."""
        jobs = self.stack.client.jobs
        job_id = self.new_job(1 if state is JobState.SUCCEEDED else 1000)
        if state is JobState.SUCCEEDED:
            self.stack.wait(job_id)
            return job_id
        wait_until(lambda: jobs.get(job_id).state is JobState.RUNNING, f"{job_id} runs")
        if state is JobState.PAUSED:
            jobs.pause(job_id)
        return job_id

    def end(self, job_id: str) -> None:
        """End the job, so that the one trainer is free for the next test."""
        if not self.stack.job(job_id).state.is_final:
            self.stack.client.jobs.cancel(job_id)
            self.stack.wait(job_id)


@pytest.fixture(scope="package")  # the environment of its services is no other test's
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    folder = tmp_path_factory.mktemp("docs")
    installed = folder / "installed"
    installed.mkdir()
    write_tied_model(folder / "model")
    # A package of a page is installed by being in the folder: rollouts, broker and commands look for it each time.
    path = os.pathsep.join(filter(None, [str(installed), os.environ.get("PYTHONPATH", "")]))
    with patch.dict(os.environ, {"PYTHONPATH": path}), running(folder) as stack:
        data = {"type": "jsonl", "path": str(folder / "data" / "prompts.jsonl")}
        evaluation = {"data": data, "num_prompts": 2, "every_iterations": 2}
        job = tiny_job(folder, schedule={"num_iterations": 3}, evaluation=evaluation)
        finished = stack.client.jobs.create(job).id
        assert stack.wait(finished).state is JobState.SUCCEEDED
        yield Workplace(stack, folder, finished)


@pytest.fixture
def in_page_folder(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Go to the folder of a page, with the environment of a user of the stack."""

    def enter(page: str) -> Path:
        folder = workplace.folder_of(page)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("ONBEAT_URL", workplace.stack.url)
        monkeypatch.setenv("ONBEAT_DATA_DIR", str(workplace.stack.data_dir))
        return folder

    return enter
