"""One stack for all tests of this folder, and one job that several of them look at."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from onbeat.contracts.states import JobState
from onbeat.local.supervisor import ServiceSpec
from tests.chaos.options import install_opinions
from tests.e2e.stack import RunningStack, running, tiny_job
from tests.installed import install

LETTERS = """
from onbeat.environments import Outcome

class Letters:
    def __init__(self, worth): self.worth = worth

    async def run(self, task, policy):
        answer = await policy.chat(task.messages)
        num_letters = sum("a" <= letter <= "z" for letter in answer["content"])
        return Outcome(self.worth * num_letters, {"letters": float(num_letters)})
"""


@dataclass(frozen=True)
class Finished:
    """A job that has succeeded."""

    id: str
    num_iterations: int = 6


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-stack")


@pytest.fixture(scope="package")
def stack(folder: Path) -> Iterator[RunningStack]:
    python_path = install_opinions(folder / "site")
    install(folder / "site", "letters", "[onbeat.environments]\nletters = letters:Letters\n", letters=LETTERS)

    def change(specs: list[ServiceSpec]) -> list[ServiceSpec]:
        return [replace(spec, env={**spec.env, "PYTHONPATH": python_path}) for spec in specs]

    with running(folder, change=change) as stack:
        yield stack


@pytest.fixture(scope="package")
def finished(stack: RunningStack, folder: Path) -> Finished:
    job = tiny_job(
        folder,
        objective={"type": "grpo"},
        training={"max_tokens_per_micro_batch": 256},
        schedule={"num_iterations": 6},
        checkpoint={"every_iterations": 1},
    )
    job_id = stack.client.jobs.create(job).id
    assert stack.wait(job_id).state is JobState.SUCCEEDED
    return Finished(job_id)
