"""The version stands in onbeat/__init__.py; what cannot compute it says the same."""

import re
import shutil
import subprocess
from pathlib import Path

from onbeat import __version__

ROOT = Path(__file__).parents[3]
PLACES = re.compile(
    r'(?:ONBEAT_VERSION=|__version__ = ")([\w.]+)|\b(\d+\.\d+\.\d+\w*)-(?:cpu|cuda|npu)\b|onbeat-(\d[\w.]*)-py3'
)
FILES = ["onbeat/__init__.py", "compose.yaml", "README.md", ".env", "docs/*.md", "deploy/**/*.yaml", "deploy/docker/*"]


def versions_in(root: Path) -> list[str]:
    """Return each version that a tag of an image, a wheel or a variable has."""
    paths = [path for pattern in FILES for path in root.glob(pattern) if path.is_file()]
    return ["".join(place) for path in paths for place in PLACES.findall(path.read_text())]


def test_all_places_have_the_version():
    assert len(versions_in(ROOT)) > 15
    assert set(versions_in(ROOT)) == {__version__}


def test_make_version_changes_every_place(tmp_path: Path):
    for name in ("deploy", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("wheels"))
    (tmp_path / "onbeat").mkdir()
    for name in ("Makefile", "compose.yaml", "README.md", ".env", "onbeat/__init__.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["make", "--silent", "version", "VERSION=7.8.9"], cwd=tmp_path, check=True, timeout=30)
    assert set(versions_in(tmp_path)) == {"7.8.9"}
