"""The held-out sets of a job."""

from dataclasses import dataclass

from pydantic import Field, model_validator

from onbeat.config.data import DataConfig
from onbeat.contracts.rewards import OneOrSeveralRewards, RewardConfig
from onbeat.contracts.section import Float, PositiveInt, Section

MAX_HELD_OUT = 10_000  # prompts of an evaluation


class EvaluationSet(Section):
    """One of several held-out sets."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$", description="name in its scores, `eval/NAME/reward_mean`"
    )
    data: DataConfig
    num_prompts: PositiveInt | None = Field(
        None, le=10_000, description="number of prompts, from the first row on; default: `evaluation.num_prompts`"
    )
    reward: OneOrSeveralRewards | None = Field(None, description="one or several rewards; default: those of the job")
    solved_at: Float | None = Field(
        None, description="reward from which a response counts as solved; default: that of the job"
    )


class EvaluationConfig(Section):
    """One or several held-out sets. The job's rollouts answer them with the current version; they are not trained."""

    data: DataConfig | None = Field(None, description="data of the only set")
    sets: list[EvaluationSet] = Field(
        default_factory=list, max_length=8, description="several sets in place of `data`; summaries show the first one"
    )
    every_iterations: PositiveInt = Field(
        10, description="iterations between evaluations; the first one comes before the first iteration"
    )
    num_prompts: PositiveInt = Field(
        32, le=10_000, description="number of prompts, from the first row on; the same ones every time"
    )
    num_samples_per_prompt: PositiveInt = Field(
        1, le=1_024, description="responses to each prompt; with more than one, pass_at_k is reported, too"
    )
    temperature: Float = Field(1.0, ge=0.01, le=10, description="sampling temperature")

    @model_validator(mode="after")
    def check_sets(self) -> "EvaluationConfig":
        if (self.data is None) == (not self.sets):
            raise ValueError("evaluation.data: give the data of one set, or several sets under [[evaluation.sets]]")
        names = [held_out.name for held_out in self.sets]
        if twice := sorted({name for name in names if names.count(name) > 1 or name == "reward"}):
            raise ValueError(f"evaluation.sets: {twice[0]} is the name of two sets or of other scores; take another")
        if (total := sum(held_out.num_prompts or self.num_prompts for held_out in self.sets)) > MAX_HELD_OUT:
            raise ValueError(f"evaluation.num_prompts: {total} in all sets together; at most {MAX_HELD_OUT}")
        return self


@dataclass(frozen=True)
class HeldOutSet:
    """A held-out set, with the defaults of the job filled in."""

    name: str  # '' if it is the only set
    field: str  # the field of the job that describes it
    data: DataConfig
    num_prompts: int
    rewards: list[RewardConfig]
    solved_at: float
