"""Missing disk space is reported before it is needed, and sessions of tests give theirs back."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onbeat.disk_space import GB, main, shortage

ROOT = Path(__file__).parents[2]
TESTS = """
import subprocess, sys, tempfile
def test_passes(tmp_path):
    (tmp_path / "passed").touch()
    tempfile.mkdtemp(prefix="litter-")
    subprocess.run([sys.executable, "-c", "import tempfile; tempfile.mkdtemp(prefix='litter-')"], check=True)
def test_fails(tmp_path):
    (tmp_path / "failed").touch()
    assert {is_fine}
"""


def usage(free: float):
    return lambda folder: SimpleNamespace(free=int(free))


# ---- is there disk space? --------------------------------------------------------------------------------------------


def test_message_names_folder_free_and_needed_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", usage(1.26 * GB))
    message = f"{tmp_path}/not/there has 1.3 GB free, three checkpoints need 5.7 GB"
    assert shortage(tmp_path / "not" / "there", 5.7 * GB, "three checkpoints") == message
    assert shortage(tmp_path, 1.26 * GB, "three checkpoints") == ""


def test_a_folder_that_is_not_there_yet_counts_as_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(folder) or SimpleNamespace(free=0))
    shortage(tmp_path / "a" / "b", 1, "they")
    monkeypatch.chdir(tmp_path)
    shortage(Path("a"), 1, "they")
    assert asked == [tmp_path, tmp_path]


def test_make_asks_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-I", str(ROOT / "onbeat" / "disk_space.py"), str(tmp_path), "0", "packages"]
    assert subprocess.run(command, capture_output=True, cwd="/").returncode == 0
    monkeypatch.setattr(shutil, "disk_usage", usage(1 * GB))
    assert main([str(tmp_path), "5", "packages"]) == 1
    assert capsys.readouterr().err == f"{tmp_path} has 1.0 GB free, packages need 5.0 GB; free disk space first\n"


# ---- sessions of tests -------------------------------------------------------------------------------------------


def run_session(folder: Path, temporary: Path, is_fine: bool) -> str:
    (folder / "test_it.py").write_text(TESTS.format(is_fine=is_fine))
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "--rootdir", str(folder), "-c", os.devnull]
    command = [sys.executable, "-m", "pytest", *options, "-o", "tmp_path_retention_policy=failed", str(folder)]
    env = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == (0 if is_fine else 1), done.stdout + done.stderr
    return done.stdout


def test_a_session_leaves_what_failed_tests_had_until_the_next(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    out = run_session(tmp_path, temporary, is_fine=False)
    (left,) = temporary.iterdir()
    assert f"temporary files of failed tests are in {left} until the next session" in out
    assert [path.name for path in left.rglob("*") if path.is_file() and path.name in ("passed", "failed")] == ["failed"]
    out = run_session(tmp_path, temporary, is_fine=True)
    assert list(temporary.iterdir()) == []
    assert "temporary files" not in out
