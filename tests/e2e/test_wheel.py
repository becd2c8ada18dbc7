"""The documented install: the wheel and the lock of a release, in an empty environment, away from any checkout."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from onbeat import __version__

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.rare


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that `make wheel` fills."""
    folder = tmp_path_factory.mktemp("release")
    set_up = Path(sys.prefix) / ".setup-cpu"  # these packages run the test, old or not: there is no set-up now
    run(["make", "--silent", "wheel", f"DIST={folder}", f"--old-file={set_up.relative_to(ROOT)}"], ROOT)
    return folder


def test_a_release_is_the_wheel_locks_and_a_job(release: Path):
    wheel = f"onbeat-{__version__}-py3-none-any.whl"
    assert {path.name for path in release.iterdir()} == {
        wheel,
        "cpu.lock",
        "cuda.lock",
        "install.py",
        "quickstart.toml",
    }


def test_the_wheel_carries_all_files_of_the_packages(release: Path):
    (wheel,) = release.glob("*.whl")
    carried = set(zipfile.ZipFile(wheel).namelist())
    files = [path for package in ("onbeat", "services") for path in (ROOT / package).rglob("*") if path.is_file()]
    assert len(files) > 300
    assert {str(path.relative_to(ROOT)) for path in files if path.parent.name != "__pycache__"} <= carried


@pytest.mark.timeout(1800)
def test_wheel_and_lock_run_the_quick_start(release: Path, tmp_path: Path):
    venv.create(tmp_path / "environment", with_pip=True, symlinks=True)
    python = tmp_path / "environment/bin/python"
    run([str(python), "install.py", "cpu.lock"], release)
    (wheel,) = release.glob("*.whl")
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", str(wheel)], release)

    folder = tmp_path / "a-project"  # a project with a package of the name that Onbeat's services have
    (folder / "services").mkdir(parents=True)
    (folder / "services/__init__.py").write_text("raise RuntimeError('a service of the user was imported')\n")
    command = [str(python.with_name("onbeat")), "run", str(release / "quickstart.toml"), "--report", "report.json"]
    run([*command, "--set", "schedule.num_iterations=2"], folder)
    report = json.loads((folder / "report.json").read_text())
    assert (report["state"], len(report["iterations"])) == ("SUCCEEDED", 2)
    assert (folder / ".onbeat").is_dir()


def run(command: list[str], folder: Path) -> None:
    """Run a command as in a new terminal: nothing of these tests' environment is found."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
