"""Packages of a user, as `pip install` leaves them behind in a folder, and packages of a lock of their own."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from filelock import FileLock


def install(site: Path, name: str, entry_points: str, **modules: str) -> Path:
    """Write a package into the folder `site`: its entry points, and the code of its modules by their names."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    for module, code in modules.items():
        (site / f"{module}.py").write_text(code)
    return site


def install_lock(lock: Path) -> Path:
    """Return the folder with the lock's packages, installed once for each lock, also by tests that run side by side."""
    folder = Path(sys.prefix) / f"{lock.stem}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    with FileLock(folder.with_suffix(".lock"), timeout=300):
        if not folder.exists():
            partial = folder.with_suffix(f".{os.getpid()}")
            options = ["--quiet", "--no-deps", "--target", str(partial), "--requirement", str(lock)]
            uv = Path(sys.executable).with_name("uv")
            pips = [[str(uv), "pip"]] * uv.exists() + [[sys.executable, "-m", "pip"]]  # uv is faster, if it can
            for pip in pips:
                done = subprocess.run([*pip, "install", *options], timeout=240, check=pip == pips[-1])
                if done.returncode == 0:
                    break
            partial.rename(folder)
    return folder
