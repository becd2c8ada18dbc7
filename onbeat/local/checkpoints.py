"""Checkpoints and model folders on this disk, as `onbeat chat` takes them: without a broker.

DATA/jobs/JOB/checkpoints/iteration-000040/     complete once it has state.json; onbeat_job.json names its job
"""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from onbeat.config import JobConfig
from onbeat.contracts.data_folder import JOB_FILE
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.section import IS_ACCEPTED
from onbeat.process.children import command_of, last_words

NAME = re.compile(r"iteration-\d{6,}")  # a copy beside a checkpoint has another name
STATE_FILE = "state.json"
BUNDLED = "bundled:"
CONVERSION_DEADLINE_S = 300.0


@dataclass(frozen=True)
class Checkpoint:
    """A model folder. `job_id` and `job` are None where no job of this version of Onbeat has written it."""

    folder: Path
    job_id: str | None = None
    job: JobConfig | None = None
    policy_version: int = 0

    @property
    def name(self) -> str:
        return self.job_id or self.folder.name


def is_model(folder: Path) -> bool:
    """Return whether the folder has a model in Hugging Face layout."""
    return (folder / "config.json").is_file() and next(folder.glob("*.safetensors"), None) is not None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint, or the plain model, of a folder."""
    try:
        record = json.loads((folder / JOB_FILE).read_text("utf-8"))
        job_id, job = str(record["id"]), JobConfig.model_validate(record["config"], context=IS_ACCEPTED)
        version = int(json.loads((folder / STATE_FILE).read_text("utf-8"))["state"]["policy_version"])
    except (OSError, ValueError, KeyError, TypeError):  # ValidationError is a ValueError
        return Checkpoint(folder)
    return Checkpoint(folder, job_id, job, version)


def complete_checkpoints(checkpoints: Path) -> dict[int, Path]:
    """Return the complete checkpoints in a job's folder of them, by their numbers of iterations, oldest first."""
    written = (path.parent for path in checkpoints.glob(f"iteration-*/{STATE_FILE}"))
    numbered = {
        int(folder.name.removeprefix("iteration-")): folder for folder in written if NAME.fullmatch(folder.name)
    }
    return dict(sorted(numbered.items()))


def checkpoints_of(data_dir: Path, job_id: str) -> dict[int, Path]:
    return complete_checkpoints(data_dir / "jobs" / job_id / "checkpoints")


def newest_checkpoint(data_dir: Path, job: str) -> Checkpoint | None:
    """Return the newest checkpoint of a job in the data folder, by its id, or by its name if no other job there has it.

    Raises OnbeatError when several have the name.
    """
    if "/" not in job and (folders := checkpoints_of(data_dir, job)):
        return read_checkpoint(folders[max(folders)])
    named = []
    for folder in sorted((data_dir / "jobs").glob("*/checkpoints")):
        if folders := complete_checkpoints(folder):
            checkpoint = read_checkpoint(folders[max(folders)])
            if checkpoint.job is not None and checkpoint.job.name == job:
                named.append(checkpoint)
    if len(named) > 1:
        ids = ", ".join(checkpoint.name for checkpoint in named)
        raise OnbeatError(f"several jobs in {data_dir} are named {job}: {ids}; take an id")
    return named[0] if named else None


def model_before(checkpoint: Checkpoint) -> str:
    """Return the model that the job began with: a folder, or an id on the hub. Raises OnbeatError when it is unknown or
    not there any more."""
    job = checkpoint.job
    if job is None:
        raise OnbeatError(f"{checkpoint.folder} does not say which job wrote it, so the model before is not known")
    if job.fork is not None:
        jobs = checkpoint.folder.parents[2]
        source = jobs / job.fork.job / "checkpoints" / f"iteration-{job.fork.iteration:06d}"
        if not is_model(source):
            raise OnbeatError(f"the job began with {source}, which is not there any more; leave --compare out")
        return str(source)
    path = job.model.path
    if path.startswith(BUNDLED):
        return unpack_bundled(path.removeprefix(BUNDLED))
    folder = Path(path).expanduser()
    if folder.is_absolute() and not folder.is_dir():
        raise OnbeatError(f"the job began with {folder}, which is not there any more; leave --compare out")
    return str(folder) if folder.is_absolute() else path


def unpack_bundled(name: str) -> str:
    """Return the folder of a bundled model, which is converted unless it is there. Raises OnbeatError."""
    command = command_of("services.trainer.model.bundled", name)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OnbeatError(f"model {BUNDLED}{name} was not ready after {CONVERSION_DEADLINE_S:.0f} s") from error
    if done.returncode:
        raise OnbeatError(f"model {BUNDLED}{name} cannot be used: {last_words(done.stderr)}")
    return last_words(done.stdout)
