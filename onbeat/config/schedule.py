"""The schedule of a job: how many iterations, when a job fails, and what may overlap."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from onbeat.contracts.section import Float, PositiveFloat, PositiveInt, Section

MAX_NUM_ITERATIONS = 1_000_000


class Schedule(Section):
    num_iterations: PositiveInt = Field(le=MAX_NUM_ITERATIONS, description="iterations of the whole job")
    earlier_ends: list[PositiveInt] = Field(
        default_factory=list,
        max_length=10_000,
        description="previous totals of iterations, recorded when a job is resumed with more of them; a decaying "
        "learning rate reaches 0 at each of them",
    )
    iteration_deadline_s: Float = Field(
        1800.0, gt=0, le=7 * 86_400, description="time without progress in an iteration after which the job fails"
    )
    start_deadline_s: Float = Field(
        86400.0,
        gt=0,
        le=365 * 86_400,
        description="time without any live trainer in its pool after which a pending job fails",
    )
    max_lost_trainers: PositiveInt = Field(
        10,
        le=1_000,
        description="number of trainers lost in a row, with no committed iteration in between, after which the job "
        "fails; a trainer that was asked to stop does not count",
    )
    stop_without_signal: PositiveInt | None = Field(
        None,
        le=1_000_000,
        description="number of iterations in a row in which no group has signal (`objective.signal`), solved or not, "
        "after which the job writes a checkpoint and fails; default: no limit",
    )

    @property
    def ends(self) -> list[int]:
        """The totals of iterations that the job had and has, in ascending order."""
        return [*self.earlier_ends, self.num_iterations]


class PeriodicSchedule(Schedule):
    """Train on groups while others are still being generated. Strictly on-policy: one policy version per iteration."""

    mode: Literal["periodic"] = "periodic"


class SyncSchedule(Schedule):
    """Generate all groups of an iteration, then train."""

    mode: Literal["sync"]


class BoundedSchedule(Schedule):
    """Generate iteration t with one version >= t - max_staleness, so that rollouts need not wait for the trainer."""

    mode: Literal["bounded"]
    max_staleness: PositiveInt = Field(
        1, le=64, description="largest number of iterations between the policy that generated and the trained one"
    )
    publish_above_kl: PositiveFloat | None = Field(
        None,
        description="estimated divergence (k3, nats per token) from the published version above which a new version is "
        "published; versions that are evaluated or that max_staleness requires are published, too. Default: every "
        "version is published",
    )

    @model_validator(mode="after")
    def check_publishing(self) -> "BoundedSchedule":
        if self.publish_above_kl is not None and self.max_staleness < 2:
            raise ValueError("schedule.publish_above_kl: has no effect with max_staleness = 1; set that to 2 or more")
        return self


ScheduleConfig = Annotated[PeriodicSchedule | SyncSchedule | BoundedSchedule, Field(discriminator="mode")]
