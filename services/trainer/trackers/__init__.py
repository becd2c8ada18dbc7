"""Experiment trackers for a job's curves: TensorBoard files always; W&B, MLflow and Trackio when the job asks for them.

The ledger holds all numbers; a tracker is a reader that keeps up with it (`follow`). The training loop does not depend
on trackers and never waits for one.
"""

import importlib.util
from functools import cache

TYPES = ("wandb", "mlflow", "trackio")  # a package and a type of `TrackerConfig` each


@cache
def installed_trackers() -> list[str]:
    return [name for name in TYPES if importlib.util.find_spec(name) is not None]
