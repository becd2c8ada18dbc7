"""One stack for all tests of this folder, whose broker exports traces, and one job that several of them look at."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onbeat.types import JobState
from tests.e2e.stack import RunningStack, running, tiny_job
from tests.otlp_receiver import Receiver


@dataclass(frozen=True)
class Finished:
    """A job that has succeeded, with what its stream sent."""

    id: str
    updates: list[Any]
    num_iterations: int = 6  # with 8 prompts each: more than the 20 that there are
    num_prompts: int = 8
    num_samples: int = 4


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("one-stack")


@pytest.fixture(scope="package")
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture(scope="package")
def stack(folder: Path, receiver: Receiver) -> Iterator[RunningStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONBEAT_OTLP_ENDPOINT", receiver.url)
        with running(folder) as stack:
            yield stack


@pytest.fixture(scope="package")
def finished(stack: RunningStack, folder: Path) -> Finished:
    job = tiny_job(
        folder,
        objective={"type": "grpo"},
        rollout={"num_prompts_per_iteration": 8, "num_samples_per_prompt": 4},
        training={"max_tokens_per_micro_batch": 256},
        schedule={"num_iterations": 6},
        checkpoint={"every_iterations": 1},
    )
    job_id = stack.client.jobs.create(job).id
    updates = list(stack.client.jobs.stream(job_id))
    assert stack.job(job_id).state is JobState.SUCCEEDED
    return Finished(job_id, updates)
