"""Installations that lack packages say which extra to install, before anything fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import build_meta

ROOT = Path(__file__).parents[3]
JOB = str(ROOT / "examples/quickstart.toml")

# Packages that are as if they were not installed.
HIDE = """
import importlib.metadata, os, sys

HIDDEN = os.environ["HIDDEN"].split()
distribution = importlib.metadata.Distribution.from_name

def from_name(name):
    if name in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0].replace("_", "-") in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

importlib.metadata.Distribution.from_name = from_name
sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the metadata of today's wheel, and the hook that hides packages."""
    folder = tmp_path_factory.mktemp("installation")
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        build_meta.prepare_metadata_for_build_wheel(str(folder))
    finally:
        os.chdir(here)
    (folder / "sitecustomize.py").write_text(HIDE)
    return folder


@pytest.mark.parametrize(
    ("command", "hidden", "sentence"),
    [
        ("services.broker", "fastapi", "the broker needs the packages of the extra `broker`"),
        ("services.trainer", "torch", "the trainer needs the packages of the extra `trainer`"),
        ("services.trainer", "tensorboard", "the trainer needs the packages of the extra `trainer`"),
        ("services.rollout", "xxhash", "the rollout needs the packages of the extra `rollout`"),
        (f"onbeat.cli run {JOB}", "torch", "error: a stack on this machine needs the packages of the extra `local`"),
        ("onbeat.cli up", "fastapi uvicorn", "error: a stack on this machine needs the packages of the extra `local`"),
        (
            f"onbeat.cli plan memory {JOB}",
            "torch",
            "error: a plan of the memory needs the packages of the extra `trainer`",
        ),
        ("onbeat.cli replay job --iteration 0", "peft", "error: a replay needs the packages of the extra `trainer`"),
        (
            "onbeat.cli model prepare x",
            "gguf",
            "error: a model of the trainer needs the packages of the extra `trainer`",
        ),
        (
            f"onbeat.cli reward try {JOB}",
            "pyarrow",
            "error: the data of a job needs the packages of the extra `broker`",
        ),
    ],
)
def test_one_sentence_names_the_extra(installation: Path, tmp_path: Path, command: str, hidden: str, sentence: str):
    environment = os.environ | {"PYTHONPATH": f"{installation}:{ROOT}", "HIDDEN": hidden}
    done = subprocess.run(
        [sys.executable, "-P", "-m", *command.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    extra = re.findall("`(.+)`", sentence)[0]
    packages = ", ".join(hidden.split())
    assert done.stderr.split("\n") == [f"{sentence}: pip install 'onbeat[{extra}]' (not installed: {packages})", ""]
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("code", "hidden", "sentence"),
    [
        (
            'from services.rollout.rewards.builtin import math; math("1", {"answer": "1"})',
            "math-verify",
            "the reward math needs the packages of the extra `math`",
        ),
        (
            "from services.broker.datasets import procedural; procedural.ReasoningGymDataset(None, None)",
            "reasoning-gym",
            "data.type: this type of data needs the packages of the extra `reasoning-gym`",
        ),
    ],
)
def test_an_annex_names_its_extra(installation: Path, tmp_path: Path, code: str, hidden: str, sentence: str):
    environment = os.environ | {"PYTHONPATH": f"{installation}:{ROOT}", "HIDDEN": hidden}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert sentence in done.stderr.splitlines()[-1]
