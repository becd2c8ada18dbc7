"""Data sets of a hub, by the library `datasets`. A split is fetched once and kept as a Parquet file.

DATA_DIR/datasets/.hub/NAME.parquet    the split, which jobs read from then on
DATA_DIR/datasets/.hub/cache           what is being downloaded
DATA_DIR/datasets/.hub/lock            held by the process that downloads
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import re
import shutil
from pathlib import Path, PurePath
from typing import Any

from onbeat.config import HubData
from onbeat.contracts.records import DATASETS_FOLDER
from services.broker.datasets import DatasetError, is_secret

HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")
ON_HUB = "hf://"
MAX_REASON = 300  # characters of what the library says


def fetch_split(data: HubData, data_dir: Path) -> Path:
    """Return the Parquet file of the split. Raises DatasetError with a remedy."""
    if not HUB_ID.fullmatch(data.path) or ".." in data.path:
        raise DatasetError("data.path", f"{data.path!r} is no hub id; it is like openai/gsm8k")
    data_dir = data_dir.resolve()
    folder = data_dir / DATASETS_FOLDER / ".hub"
    wanted = json.dumps([data.path, data.subset, data.split, data.revision, *local_state(data.path, data_dir)])
    target = folder / f"{data.path.replace('/', '-')}-{hashlib.sha256(wanted.encode()).hexdigest()[:16]}.parquet"
    if target.is_file():
        return target
    if importlib.util.find_spec("datasets") is None:
        message = "needs the package `datasets` where the broker runs, which is not installed; download the data set"
        raise DatasetError("data.type", f"{message} as Parquet, and upload it with `onbeat data push`")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if target.is_file():  # another process has fetched it meanwhile
                return target
            (folder / "cache").mkdir(exist_ok=True)
            draft = target.with_suffix(".new")
            with contextlib.chdir(folder / "cache"):  # a folder of the broker that has the name is not the hub's
                read_split(data, data_dir, folder / "cache").to_parquet(draft)
            draft.replace(target)
            shutil.rmtree(folder / "cache", ignore_errors=True)
    except DatasetError:
        raise
    except Exception as error:  # the library raises errors of half a dozen others
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:MAX_REASON] or type(cause).__name__
        raise DatasetError("data.path", f"{data.path} cannot be fetched: {reason}") from error
    return target


def is_local(path: str, data_dir: Path) -> bool:
    return (data_dir / path).is_dir() and not is_secret(PurePath(path))


def local_state(path: str, data_dir: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of each file of a data set that is a folder; nothing for one of a hub."""
    files = sorted((data_dir / path).rglob("*")) if is_local(path, data_dir) else []
    return [(str(file), file.lstat().st_size, file.lstat().st_mtime_ns) for file in files if not file.is_dir()]


def read_split(data: HubData, data_dir: Path, cache: Path) -> Any:
    """Download and prepare the split. Raises DatasetError, or whatever the library raises."""
    import datasets

    datasets.disable_progress_bars()
    local, is_folder = data_dir / data.path, is_local(data.path, data_dir)
    source, revision = (str(local), None) if is_folder else (data.path, data.revision)
    builder = datasets.load_dataset_builder(source, data.subset, cache_dir=str(cache), revision=revision)
    for file in (str(file) for files in (builder.config.data_files or {}).values() for file in files):
        is_its_own = Path(file).resolve().is_relative_to(local) if is_folder else file.startswith(ON_HUB)
        if not is_its_own:  # a data set could name files of this machine
            raise DatasetError("data.path", f"{data.path} has a file outside of itself: {file}")
    splits = list(builder.info.splits or builder.config.data_files or {})
    if splits and data.split not in map(str, splits):
        raise DatasetError(
            "data.split", f"{data.path} has no split {data.split!r}; it has: {', '.join(map(str, splits))}"
        )
    builder.download_and_prepare()
    return builder.as_dataset(split=data.split)
