"""The job: what to train, as users write it in TOML or JSON. Unknown keys are refused, at every level.

Where a process runs (URLs, ports, devices) is not here: that is each service's `settings`.
"""

from onbeat.config.data import DataConfig, FileData, HubData, ReasoningGymData, RowData
from onbeat.config.evaluation import EvaluationConfig, HeldOutSet
from onbeat.config.files import apply_override, read_job_file
from onbeat.config.job import JobConfig
from onbeat.config.model import LoraConfig
from onbeat.config.rollout import EnvironmentConfig
from onbeat.config.schedule import BoundedSchedule
from onbeat.config.storage import MlflowTracker, TrackerConfig, TrackioTracker, WandbTracker
from onbeat.config.training import GacConfig, OptimizerConfig

__all__ = [
    "BoundedSchedule",
    "DataConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "FileData",
    "GacConfig",
    "HeldOutSet",
    "HubData",
    "JobConfig",
    "LoraConfig",
    "MlflowTracker",
    "OptimizerConfig",
    "ReasoningGymData",
    "RowData",
    "TrackerConfig",
    "TrackioTracker",
    "WandbTracker",
    "apply_override",
    "read_job_file",
]
