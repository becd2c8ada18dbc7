"""Storage of a job: its checkpoints, groups and curves, and the checkpoint that a fork starts from."""

from typing import Annotated, Literal

from pydantic import Field

from onbeat.section import Int, PositiveInt, Section


class CheckpointConfig(Section):
    every_iterations: PositiveInt = Field(50, description="also written at the end of the job")
    keep: Int = Field(2, ge=2, description="newest checkpoints that are kept")


class ForkConfig(Section):
    """Start from a checkpoint of another job: its weights and its optimizer. Iterations are counted on from there."""

    job: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200, description="id of the other job")
    iteration: PositiveInt = Field(description="the checkpoint that it wrote after so many iterations")


class RetentionConfig(Section):
    """What is kept of a job while it is there. Deleting a job removes all but the trainer's checkpoints."""

    rollout_iterations: PositiveInt | None = Field(
        None,
        description="newest iterations contained in a checkpoint whose groups are kept, for samples, replay and audit; "
        "default: 50, or checkpoint.every_iterations if that is more",
    )


class Tracker(Section):
    """A place for the curves besides TensorBoard. Addresses and keys: the trainer's environment, never the job."""

    project: str = Field(
        "onbeat",
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="W&B or Trackio project, MLflow experiment; the run has the job's id",
    )


class WandbTracker(Tracker):
    """Weights & Biases."""

    type: Literal["wandb"]
    entity: str | None = Field(None, description="user or team; default: that of the trainer's API key")
    tags: list[str] = Field(default_factory=list, max_length=20, description="of the run")


class MlflowTracker(Tracker):
    type: Literal["mlflow"]


class TrackioTracker(Tracker):
    type: Literal["trackio"]


TrackerConfig = Annotated[WandbTracker | MlflowTracker | TrackioTracker, Field(discriminator="type")]
