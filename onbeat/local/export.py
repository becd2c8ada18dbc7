"""Folders that `onbeat export` writes from a checkpoint on this disk: a merged model, or what stands beside an adapter.

A folder is written under another name, `.NAME.partial` beside it, and appears when all of it is on disk.
"""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onbeat.contracts.data_folder import JOB_FILE
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.records import JobRecord
from onbeat.local.checkpoint_folders import checkpoints_of, files_in, size_of
from onbeat.local.checkpoints import BUNDLED, STATE_FILE
from onbeat.machine.disk_space import shortage

TRAINING = ("optimizer", "policies", STATE_FILE, JOB_FILE)  # names that only training needs
OF_MODEL = re.compile(r"(config|generation_config)\.json|.*\.safetensors(\.index\.json)?")  # not beside an adapter
LEGAL = re.compile(r"(LICEN[SC]E|NOTICE|COPYING|USE_POLICY)([.-].*)?", re.IGNORECASE)
LICENCE = re.compile(r"^license:\s*[\"']?([A-Za-z0-9.-]+)[\"']?\s*$", re.MULTILINE)
LICENCES_OF_BUNDLED = {"smollm2-135m-instruct": "apache-2.0"}
NAMES_ON_HUB = ("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE", "USE_POLICY.md")


def kept_checkpoint(data_dir: Path, job: JobRecord, number: int | None) -> tuple[int, Path]:
    """Return the newest checkpoint of the job, or the one after `number` iterations. Raises OnbeatError."""
    kept = checkpoints_of(data_dir, job.id)
    if not kept:
        written = (
            f"the newest is {job.checkpoint} on the trainer's machine" if job.checkpoint else "it has written none"
        )
        raise OnbeatError(f"no checkpoint of job {job.id} is in {data_dir}: {written}; export where that folder is")
    if number is None:
        number = max(kept)
    if number not in kept:
        raise OnbeatError(
            f"job {job.id} has no checkpoint after {number} iterations any more, or never had; there are those after "
            f"{', '.join(map(str, kept))} in {data_dir}"
        )
    return number, kept[number]


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give a new folder to write into. At the end of the block it is on disk, and becomes `target`, which is new, too.

    Raises OnbeatError. What a killed process has left under the other name is removed by the next one.
    """
    if target.exists():
        raise OnbeatError(f"{target} exists already; give another folder with --to, an export overwrites nothing")
    draft = target.with_name(f".{target.name}.partial")
    with own_folder(draft, f"another export is writing {target}; wait for it, or give another --to"):
        yield draft
        for path in [*draft.rglob("*"), draft]:
            sync(path)
        draft.rename(target)
        sync(target.parent)


@contextmanager
def passing_folder(name: str) -> Iterator[Path]:
    """Give a folder for the length of the block, with the same name each time: what a killed process has left in it is
    removed by the next one. Raises OnbeatError."""
    folder = Path(f".onbeat-push-{name}")
    with own_folder(folder, f"another push of {name} is running in this folder; wait for it"):
        yield folder
        shutil.rmtree(folder)


@contextmanager
def own_folder(folder: Path, busy: str) -> Iterator[None]:
    """Make a folder that is empty, and no other process's; an error in the block removes it. Raises OnbeatError, with
    the sentence `busy` while another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OnbeatError(busy) from error
        try:
            empty(folder)
            yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def copy_files(checkpoint: Path, target: Path, *, is_adapter: bool) -> None:
    """Copy what users need of a checkpoint: all that a model folder has, or without weights and configuration.

    Raises OnbeatError if the disk is too small, or if the trainer drops the checkpoint meanwhile.
    """
    names = [name for path in sorted(checkpoint.iterdir()) if (name := path.name) not in TRAINING]
    names = [name for name in names if not (is_adapter and OF_MODEL.fullmatch(name))]
    if problem := shortage(target.parent, sum(size_of(checkpoint / name) for name in names), "the exported files"):
        raise OnbeatError(f"{problem}; free disk space, or export to another disk with --to")
    try:
        for name in names:
            copy = shutil.copytree if (checkpoint / name).is_dir() else shutil.copyfile
            copy(checkpoint / name, target / name)
    except FileNotFoundError as error:
        raise dropped(checkpoint) from error
    check_kept(checkpoint)


def check_kept(checkpoint: Path) -> None:
    """Raise OnbeatError if the trainer has begun to drop the checkpoint."""
    if not (checkpoint / STATE_FILE).is_file():  # the first of its files that goes
        raise dropped(checkpoint)


def dropped(checkpoint: Path) -> OnbeatError:
    return OnbeatError(
        f"the trainer dropped {checkpoint} meanwhile; export a newer one, or keep more of them (checkpoint.keep)"
    )


def files_of_base(path: str) -> dict[str, Path]:
    """Return the card and the legal texts of the model that a job began with, by name, as far as they are here."""
    if path.startswith(BUNDLED):
        return {}
    folder = Path(path).expanduser()
    if folder.is_absolute():
        return {file.name: file for file in files_in(folder) if file.parent == folder and is_about(file.name)}
    try:
        from huggingface_hub import try_to_load_from_cache
    except ModuleNotFoundError:
        return {}
    cached = {name: try_to_load_from_cache(path, name) for name in NAMES_ON_HUB}
    return {name: Path(file) for name, file in cached.items() if isinstance(file, str)}


def is_about(name: str) -> bool:
    return name == "README.md" or LEGAL.fullmatch(name) is not None


def licence_of_base(path: str, files: dict[str, Path]) -> str:
    """Return the name of the licence, as the card of the base has it; '' if it is not known here."""
    if path.startswith(BUNDLED):
        return LICENCES_OF_BUNDLED.get(path.removeprefix(BUNDLED), "")
    if "README.md" not in files:
        return ""
    head = files["README.md"].read_text("utf-8", errors="replace").removeprefix("---").partition("\n---")[0]
    match = LICENCE.search(head)
    return match[1] if match else ""


def copy_legal(files: dict[str, Path], target: Path) -> None:
    """Copy the legal texts of the base beside the model that was made from it."""
    for name, file in files.items():
        if LEGAL.fullmatch(name):
            shutil.copyfile(file, target / name)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
