"""Storage of a job: its checkpoints, groups and curves, and the checkpoint that a fork starts from."""

from typing import Annotated, Literal

from pydantic import Field

from onbeat.contracts.section import Int, PositiveInt, Section


class CheckpointConfig(Section):
    every_iterations: PositiveInt = Field(
        50, description="iterations between checkpoints; one is also written at the end of the job"
    )
    keep: Int = Field(2, ge=2, description="number of newest checkpoints that are kept")


class ForkConfig(Section):
    """A start from a checkpoint of another job: its weights and its optimizer. Iterations are counted on from there."""

    job: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200, description="id of the other job")
    iteration: PositiveInt = Field(description="number of iterations in the checkpoint of that job")


class RetentionConfig(Section):
    """Limits on the data that is kept of a job. Deleting the job removes everything but the trainer's checkpoints."""

    rollout_iterations: PositiveInt | None = Field(
        None,
        description="number of iterations whose groups are kept for samples, replay and audit: the newest ones that a "
        "checkpoint contains. Later ones are kept, too. Default: 50, or checkpoint.every_iterations if that is more",
    )


class TrackerSection(Section):
    """A tracker besides TensorBoard. Addresses and keys are in the trainer's environment, not in the job."""

    project: str = Field(
        "onbeat",
        max_length=100,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="project in W&B or Trackio, experiment in MLflow; the run is named by the id of the job",
    )
    samples: bool = Field(
        False, description="send tables of a few prompts and responses, too; TensorBoard always has them"
    )


class WandbTracker(TrackerSection):
    """Weights & Biases."""

    type: Literal["wandb"]
    entity: str | None = Field(None, description="user or team; default: the owner of the trainer's API key")
    tags: list[str] = Field(default_factory=list, max_length=20, description="tags of the run")


class MlflowTracker(TrackerSection):
    type: Literal["mlflow"]


class TrackioTracker(TrackerSection):
    type: Literal["trackio"]


TrackerConfig = Annotated[WandbTracker | MlflowTracker | TrackioTracker, Field(discriminator="type")]
