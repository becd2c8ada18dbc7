"""Promises of the Python SDK besides its calls: types, an example that runs, a page that names all."""

import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from onbeat.client import AsyncClient, Client, Jobs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SCRIPT = """
import asyncio

from onbeat import AsyncClient, Client, JobConfig
from onbeat.client import ApiError, BrokerUnreachable, Series, Update
from onbeat.contracts.records import (GroupDetail, IterationUpdate, JobRecord, Sample)


def look(client: Client) -> list[Sample]:
    job: JobRecord = client.jobs.create(JobConfig.from_file("job.toml"), idempotency_key="mine")
    for update in client.jobs.stream(job.id):
        if isinstance(update, IterationUpdate):
            reward: float | None = update.record.reward_mean
            print(reward)
    curves: Series = client.jobs.metrics(job.id, after=3)
    group: GroupDetail = client.jobs.group(job.id, "g")
    print(curves, group, client.doctor().findings[0].sentence)
    samples = client.jobs.samples(job.id, min_reward=0.5)
    return samples[:3] + [samples[0]]


async def listen(job_id: str) -> None:
    async with AsyncClient("http://127.0.0.1:8800", api_key="k") as client:
        try:
            async for update in client.jobs.stream(job_id):
                seen: Update = update
                print(seen)
        except (ApiError, BrokerUnreachable) as error:
            print(error)
        job = await client.jobs.wait(job_id, timeout_s=3)
        print(job.state.is_final)


asyncio.run(listen("job-1"))
"""


def mypy(script: str, folder: Path) -> str:
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent", str(path)]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "user-script")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    return done.stdout + done.stderr


@pytest.mark.rare
def test_user_script_passes_strict_types_and_a_wrong_one_fails(tmp_path: Path) -> None:
    assert "Success" in (said := mypy(SCRIPT, tmp_path)), said
    wrong = SCRIPT.replace("reward: float | None", "reward: str").replace("after=3", "behind=3")
    said = mypy(wrong, tmp_path)
    assert "[assignment]" in said
    assert '"behind"' in said


def test_types_are_shipped() -> None:
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (ROOT / "onbeat" / "py.typed").is_file()
    assert "py.typed" in package_data["onbeat"]


# ---- example and page --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("trainer")
def test_example_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "sdk.py"), "3"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "best at the end: job-" in done.stdout


def test_page_of_the_sdk_names_every_public_method() -> None:
    page = (ROOT / "docs" / "sdk.md").read_text()
    for face, prefix in ((Jobs, "jobs."), (Client, ""), (AsyncClient, "")):
        for name, _ in inspect.getmembers(face, callable):
            if not name.startswith("_"):
                assert f"`{prefix}{name}" in page, f"docs/sdk.md does not name {prefix}{name}"
