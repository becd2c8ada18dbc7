"""Set-up finds a Python that runs, not a command that only has its name."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"


def find(version: str, folder: Path) -> str:
    """Run the script with an empty home folder and `folder`/shims first on the PATH."""
    environment = {"HOME": str(folder / "home"), "PATH": f"{folder / 'shims'}:/usr/bin:/bin"}
    command = [ROOT / "requirements" / "find-python.sh", version]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_python_on_the_path_is_found(tmp_path: Path) -> None:
    (tmp_path / "shims").mkdir()
    (tmp_path / "shims" / f"python{VERSION}").symlink_to(os.path.realpath(sys.executable))
    assert find(VERSION, tmp_path) == str(tmp_path / "shims" / f"python{VERSION}")


def test_shim_that_runs_nothing_is_passed_over(tmp_path: Path) -> None:
    write_program(tmp_path / "shims" / "python3.77", "#!/bin/sh\necho 'python3.77: command not found' >&2\nexit 127\n")
    assert find("3.77", tmp_path) == ""
    real = write_program(tmp_path / "versions" / "3.77.1" / "bin" / "python3.77", "#!/bin/sh\necho 3.77\n")
    assert find("3.77", tmp_path) == str(real)


def test_command_of_another_version_is_passed_over(tmp_path: Path) -> None:
    write_program(tmp_path / "shims" / "python3.77", "#!/bin/sh\necho 3.7\n")
    assert find("3.77", tmp_path) == ""
