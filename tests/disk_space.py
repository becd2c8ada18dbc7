"""Disk space that the chosen tests need: checked before the first of them, not half an hour later."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from onbeat.machine.disk_space import GB, shortage

# Gigabytes, rounded up. A checkpoint of the quick start's model has 2.4, and three of them are there for a moment.
SMALL_AREAS, SMALL_GB = frozenset({"unit", "fuzz", "manifests", "model"}), 1
TESTS_GB = 8  # temporary files of one test at its largest; those of passed tests are gone
VOLUMES_GB, IMAGES_GB = 9, 6  # volumes of one stack at a time; images, with the disk space for building them


def check_disk_space(items: Iterable[pytest.Item]) -> None:
    """Raise pytest.UsageError, with the folder, the free and the needed space, if a disk is too full."""
    areas, needs_engine = set(), False
    for item in items:
        areas.add(item.nodeid.split("/")[1] if item.nodeid.count("/") > 1 else "")
        needs_engine |= "images" in getattr(item, "fixturenames", ())
    needed_gb = SMALL_GB if areas <= SMALL_AREAS else TESTS_GB
    problems = [shortage(Path(tempfile.gettempdir()), needed_gb * GB, "temporary files of these tests")]
    if needs_engine and (folder := engine_folder()) is not None:
        needed_gb = VOLUMES_GB + (0 if (folder / "overlay2").is_dir() else IMAGES_GB)
        problems.append(shortage(folder, needed_gb * GB, "images and volumes of the container tests"))
    if any(problems):
        remedy = "free disk space, set TMPDIR, or choose fewer tests"
        raise pytest.UsageError(f"{'; '.join(filter(None, problems))}: {remedy}")


def engine_folder() -> Path | None:
    """Return the data folder of the container engine, or None where no engine can run and its tests are skipped."""
    if os.environ.get("DOCKER_HOST"):
        return None  # perhaps another machine
    if shutil.which("docker"):
        asked = ["docker", "info", "--format", "{{.DockerRootDir}}"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        if answer.returncode == 0 and answer.stdout.strip():
            return Path(answer.stdout.strip())
    if os.geteuid() != 0:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ONBEAT_ENGINE_DIR") or Path(cache) / "onbeat" / "engine") / "data"
