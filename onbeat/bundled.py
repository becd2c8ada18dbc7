"""The cache of bundled models: the trainer converts them into it, and the command line looks whether they are there."""

import os
import tempfile
from pathlib import Path

HOME = os.path.expanduser("~")  # stays "~" for a user without a home folder
CACHE_DIR = Path(HOME if HOME != "~" else tempfile.gettempdir(), ".cache", "onbeat")  # default of ONBEAT_CACHE_DIR


def model_folder(cache_dir: Path, name: str) -> Path:
    """Return the folder of a converted model, which appears there complete."""
    return cache_dir / "models" / name


def is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()
