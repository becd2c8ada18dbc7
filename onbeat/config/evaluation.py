"""The held-out sets of a job."""

from dataclasses import dataclass

from pydantic import Field, model_validator

from onbeat.config.data import DataConfig
from onbeat.config.rollout import EnvironmentConfig
from onbeat.contracts.rewards import OneOrSeveralRewards, RewardConfig
from onbeat.contracts.section import Float, Fraction, Int, PositiveInt, Section

MAX_HELD_OUT = 10_000  # prompts of an evaluation
MIN_TEMPERATURE = 0.01  # engines replace temperatures that are lower, except 0


class EvaluationSet(Section):
    """One of several held-out sets."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$", description="name in its scores, `eval/NAME/reward_mean`"
    )
    data: DataConfig
    num_prompts: PositiveInt | None = Field(
        None, le=10_000, description="number of prompts, from the first row on; default: `evaluation.num_prompts`"
    )
    reward: OneOrSeveralRewards | None = Field(
        None,
        description="one or several rewards of this set, whose prompts are then answered in one turn; default: those "
        "of the job",
    )
    environment: EnvironmentConfig | None = Field(
        None,
        exclude_if=lambda environment: environment is None,
        description="environment that plays this set's prompts; default: that of the job, unless the set has its own "
        "`reward`",
    )
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
    temperature: Float = Field(
        1.0, ge=0, le=10, description="sampling temperature, at least 0.01; or 0, which takes the likeliest token"
    )
    top_p: Float = Field(
        1.0, gt=0, le=1, description="sample from the likeliest tokens that together have this probability"
    )
    top_k: PositiveInt | None = Field(
        None, le=1_000_000, description="sample from so many of the likeliest tokens; default: from all"
    )
    min_p: Fraction = Field(
        0.0, description="sample from tokens that have at least this share of the likeliest one's probability"
    )
    min_tokens: Int = Field(
        0, ge=0, le=1_048_576, description="no end of the sequence and no stop before so many tokens"
    )

    @model_validator(mode="after")
    def check_sampling(self) -> "EvaluationConfig":
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise ValueError(
                f"evaluation.temperature: {self.temperature:g} is below {MIN_TEMPERATURE}; use 0, or at least that"
            )
        if self.temperature == 0 and self.num_samples_per_prompt > 1:
            raise ValueError(
                f"evaluation.num_samples_per_prompt: at temperature 0 all {self.num_samples_per_prompt} responses to a "
                "prompt are the same; use 1, or raise evaluation.temperature"
            )
        if self.temperature == 0 and (self.top_p < 1 or self.top_k is not None or self.min_p > 0):
            raise ValueError(
                "evaluation.temperature: 0 takes the likeliest token whatever top_p, top_k and min_p are; leave them "
                "out, or raise the temperature"
            )
        return self

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
    environment: EnvironmentConfig | None
    solved_at: float
