"""Checkpoints at iteration boundaries: a Hugging Face model folder plus what training needs to go on. No pickle.

    checkpoints/iteration-000040/
      model.safetensors config.json tokenizer...   loads anywhere with from_pretrained
      optimizer.safetensors                        float32 masters, both moments, GAC's previous gradient
      state.json                                   written last: a folder without it does not count

A folder appears under its name only when it is complete and on disk.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """Where training stands: all iterations before `next_iteration` are in the weights."""

    job_id: str
    next_iteration: int
    policy_version: int
    published_version: int  # the newest that rollouts know; older than policy_version when a transfer was skipped
    num_steps: int
    model_path: str

    @classmethod
    def fresh(cls, job_id: str, model_path: str) -> "TrainState":
        return cls(job_id, next_iteration=0, policy_version=0, published_version=0, num_steps=0, model_path=model_path)


class CheckpointStore:
    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, state: TrainState, model: Any, tensors: Tensors, files: dict[str, bytes]) -> Path:
        """Write, sync, rename, then drop the oldest. Returns the folder."""
        target = self.path(state.next_iteration)
        partial = self._folder / f".{target.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        save_file(tensors, partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=2))
        sync_folder(partial)
        if target.exists():
            shutil.rmtree(target)
        partial.rename(target)
        sync_path(self._folder)
        for old in self.complete()[: -self._keep]:
            shutil.rmtree(old)
        return target

    def path(self, next_iteration: int) -> Path:
        return self._folder / folder_name(next_iteration)

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(path.parent for path in self._folder.glob("iteration-*/state.json"))

    def restore(
        self, job_id: str, model_path: str, load: Callable[[Tensors, int], None], before: int | None = None
    ) -> TrainState | None:
        """Hand the newest checkpoint's tensors and number of steps to `load`; None when there is no checkpoint.

        `before`: only checkpoints that do not contain this iteration. Raises ValueError, naming the folder, when it is
        torn or belongs to another job or model.
        """
        usable = [folder for folder in self.complete() if before is None or folder.name <= folder_name(before)]
        if not usable:
            return None
        folder = usable[-1]
        try:
            state = TrainState(**json.loads((folder / "state.json").read_text()))
            if (state.job_id, state.model_path) != (job_id, model_path):
                raise ValueError(f"it belongs to job {state.job_id} on {state.model_path}")
            load(load_file(folder / "optimizer.safetensors"), state.num_steps)
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(
                f"checkpoint {folder} cannot be used: {error}; restore it from a backup, or submit the job again"
            ) from error
        logger.info("resumed from %s: next iteration %d", folder, state.next_iteration)
        return state


def folder_name(next_iteration: int) -> str:
    return f"iteration-{next_iteration:06d}"


def sync_folder(folder: Path) -> None:
    for path in folder.iterdir():
        os.chmod(path, 0o644)
        sync_path(path)
    sync_path(folder)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
