"""The job: what to train, as users write it in TOML or JSON. Unknown keys are refused, at every level.

Where a process runs (URLs, ports, devices) is not here: that is each service's `settings`.
"""

from onbeat.config.data import DataConfig, FileData, HubData, ReasoningGymData, RowData
from onbeat.config.evaluation import EvaluationConfig, EvaluationSet, HeldOutSet
from onbeat.config.files import apply_override, read_job_file
from onbeat.config.job import JobConfig
from onbeat.config.model import LoraConfig, ModelConfig
from onbeat.config.rollout import EnvironmentConfig, RolloutConfig
from onbeat.config.schedule import BoundedSchedule, PeriodicSchedule, ScheduleConfig, SyncSchedule
from onbeat.config.storage import (
    CheckpointConfig,
    ForkConfig,
    MlflowTracker,
    RetentionConfig,
    TrackerConfig,
    TrackioTracker,
    WandbTracker,
)
from onbeat.config.training import GacConfig, OptimizerConfig, TrainingConfig

__all__ = [
    "BoundedSchedule",
    "CheckpointConfig",
    "DataConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "EvaluationSet",
    "FileData",
    "ForkConfig",
    "GacConfig",
    "HeldOutSet",
    "HubData",
    "JobConfig",
    "LoraConfig",
    "MlflowTracker",
    "ModelConfig",
    "OptimizerConfig",
    "PeriodicSchedule",
    "ReasoningGymData",
    "RetentionConfig",
    "RolloutConfig",
    "RowData",
    "ScheduleConfig",
    "SyncSchedule",
    "TrackerConfig",
    "TrackioTracker",
    "TrainingConfig",
    "WandbTracker",
    "apply_override",
    "read_job_file",
]
