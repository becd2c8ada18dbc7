"""The estimate, at a job's start, of whether its checkpoints fit on the disk, from the sizes of their contents."""

import math

from onbeat.config import JobConfig
from onbeat.disk_space import GB, shortage
from services.trainer.checkpoints.store import CheckpointStore
from services.trainer.model.lora import published_sizes
from services.trainer.policy import Policy

FLOAT32_BYTES = 4


def state_bytes(config: JobConfig, num_trained: int) -> int:
    """Return the size of what the optimizer continues from: masters, both moments, GAC's last gradient."""
    return num_trained * (3 + (config.gac.mode != "off")) * FLOAT32_BYTES


def checkpoint_bytes(policy: Policy, config: JobConfig) -> int:
    """Return the size of one whole checkpoint without its small files: the optimizer's state, the weights, and versions
    that open iterations are generated with."""
    num_trained = sum(parameter.numel() for parameter in policy.optimizer.parameters.values())
    version_bytes = sum(published_sizes(policy.model).values()) * policy.compute_dtype.itemsize
    return state_bytes(config, num_trained) + version_bytes * (1 + config.max_staleness)


def shortage_warning(checkpoints: CheckpointStore, policy: Policy, config: JobConfig) -> str:
    """Return a warning if the disk cannot hold all retained checkpoints and the one being written; '' if it can."""
    size = checkpoint_bytes(policy, config)
    num_folders = min(
        config.checkpoint.keep + 1, math.ceil(config.schedule.num_iterations / config.checkpoint.every_iterations)
    )
    there = sum(
        file.stat().st_size for folder in checkpoints.complete() for file in folder.rglob("*") if file.is_file()
    )
    what = f"this job's checkpoints (at most {num_folders} of {size / GB:.1f} GB at a time)"
    problem = shortage(checkpoints.folder, max(0, num_folders * size - there), what)
    return f"{problem}; free disk space, or checkpoints cannot be written" if problem else ""
