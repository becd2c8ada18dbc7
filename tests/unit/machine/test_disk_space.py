"""Missing disk space is reported before it is needed."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from onbeat.machine.disk_space import GB, main, shortage

ROOT = Path(__file__).parents[3]


def usage(free: float):
    return lambda folder: SimpleNamespace(free=int(free))


def test_message_names_folder_free_and_needed_space(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", usage(1.26 * GB))
    message = f"{tmp_path}/not/there has 1.3 GB free, three checkpoints need 5.7 GB"
    assert shortage(tmp_path / "not" / "there", 5.7 * GB, "three checkpoints") == message
    assert shortage(tmp_path, 1.26 * GB, "three checkpoints") == ""


def test_make_asks_before_anything_is_installed(tmp_path, monkeypatch, capsys):
    command = [sys.executable, "-I", str(ROOT / "onbeat" / "machine" / "disk_space.py"), str(tmp_path), "0", "packages"]
    assert subprocess.run(command, capture_output=True, cwd="/").returncode == 0
    monkeypatch.setattr(shutil, "disk_usage", usage(1 * GB))
    assert main([str(tmp_path), "5", "packages"]) == 1
    assert capsys.readouterr().err == f"{tmp_path} has 1.0 GB free, packages need 5.0 GB; free disk space first\n"
