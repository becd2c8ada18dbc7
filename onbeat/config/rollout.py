"""The production of groups by rollouts: sampling, limits, and the environment of episodes."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from onbeat.contracts.records import MAX_TURNS
from onbeat.contracts.section import Float, Int, PositiveInt, Section

MAX_PROMPTS = 10_000  # prompts of an iteration
MAX_STOPS = 32
OVERLONG = "overlong"  # the part of a reward that shows the penalty of a long response, from 0 to -1
HELD_OUT_ONLY = ("top_p", "top_k", "min_p", "min_tokens")  # keys of other frameworks

StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=200)]],
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]


class EnvironmentConfig(Section):
    """An installed program that calls the policy as often as it needs and gives the reward. Responses are episodes."""

    name: str = Field(description="name of an installed entry point of the group `onbeat.environments`")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    max_turns: PositiveInt = Field(
        16, le=MAX_TURNS, description="largest number of calls of the policy in an episode; further calls fail"
    )
    timeout_s: Float = Field(
        120.0, gt=0, le=86_400, description="hard time limit of an episode, from its start to its reward"
    )
    memory_limit_mb: Int = Field(
        2048, ge=64, le=1_048_576, description="hard memory limit of the process that runs a group"
    )
    max_attempts: PositiveInt = Field(
        3,
        le=100,
        description="attempts at an episode in one rollout; the second attempt reuses the seeds, so the policy "
        "answers as before; later attempts sample anew",
    )


class RolloutConfig(Section):
    num_prompts_per_iteration: PositiveInt = Field(le=MAX_PROMPTS, description="groups in an iteration")
    max_prompts_per_iteration: PositiveInt | None = Field(
        None,
        le=MAX_PROMPTS,
        description="dynamic sampling (DAPO): a group without signal (`objective.signal`: rewards that are all equal) "
        "does not count, and the next prompt takes its place, until `num_prompts_per_iteration` groups count or so "
        "many prompts were used; leave it out to keep such groups",
    )
    num_samples_per_prompt: PositiveInt = Field(le=1_024, description="responses in a group (G)")
    max_response_tokens: PositiveInt = Field(le=1_048_576, description="length at which a response is cut")
    truncated: Literal["score", "zero", "mask"] = Field(
        "score",
        description="reward of a response that was cut at `max_response_tokens`, also in a turn of an episode. score: "
        "as its text is scored; zero: `truncated_reward`, so that ending pays; mask: as score, but its tokens are not "
        "trained and not counted in the divisor; held-out responses are always scored",
    )
    truncated_reward: Float = Field(
        0.0,
        ge=-1_000_000,
        le=1_000_000,
        description="reward of a response that was cut, with `truncated = 'zero'`: no more than that of the worst "
        "response, where rewards can be negative",
    )
    overlong_cache: PositiveInt | None = Field(
        None,
        description="DAPO's punishment of long responses: over so many tokens before `max_response_tokens` the reward "
        "falls linearly, by `overlong_penalty` at the limit; default, and for episodes: it does not",
    )
    overlong_penalty: Float = Field(
        1.0, gt=0, le=1000, description="reward that a response loses at the limit, with `overlong_cache`"
    )
    temperature: Float = Field(
        1.0, ge=0.01, le=10, description="sampling temperature; logprobs are those of the tempered distribution"
    )
    stop: StopStrings = Field(
        default_factory=list,
        max_length=MAX_STOPS,
        description="one or several strings that end a response. The token that completes one is the last one of the "
        "response, and is trained; rewards and environments get the text before it",
    )
    stop_token_ids: list[Annotated[Int, Field(ge=0)]] = Field(
        default_factory=list,
        max_length=MAX_STOPS,
        description="tokens that end a response besides the model's own; they are its last token, are trained, and are "
        "not part of its text",
    )
    group_deadline_s: Float = Field(
        300.0, gt=0, le=86_400, description="time limit for generating and scoring a group, from its claim"
    )
    max_group_attempts: PositiveInt = Field(
        3,
        le=100,
        description="attempts at a group before it counts as failed; an attempt counts if it ended with an error that "
        "the group may have caused. A rollout that died is no attempt: see `max_lost_rollouts`",
    )
    max_lost_rollouts: PositiveInt = Field(
        10,
        le=1_000,
        description="rollouts that may die or fall silent while they have a group, before it counts as failed: a "
        "machine that is taken away is not the group's fault, but a group that ends every rollout must end, too",
    )
    on_group_failure: Literal["skip", "fail"] = Field(
        "skip", description="consequence of a failed group. skip: it is recorded and not trained; fail: the job fails"
    )
    dispatch: Literal["longest_first", "in_order"] = Field(
        "longest_first",
        description="order of prompts within an iteration: longest responses of the previous epoch first, or the "
        "order of the data. The same groups are trained either way",
    )

    @model_validator(mode="before")
    @classmethod
    def explain_missing_sampling(cls, section: Any) -> Any:
        """Refuse by name the sampling that training cannot follow, and say why."""
        names = [name for name in HELD_OUT_ONLY if isinstance(section, dict) and name in section]
        if names:
            problems = (
                f"rollout.{name}: training samples from the whole distribution, because the trainer's "
                "log-probabilities are of all of it: tokens drawn from a part would be trained with wrong ratios; "
                f"leave it out, or set evaluation.{name} for the held-out sets"
                for name in names
            )
            raise ValueError("\n".join(problems))
        return section

    @property
    def num_reserved_prompts(self) -> int:
        """The number of prompts of the data that each iteration has for itself."""
        return self.max_prompts_per_iteration or self.num_prompts_per_iteration

    @property
    def num_rows_per_slot(self) -> int:
        """The number of rows that a slot has in a source for itself: for its prompt, and for those that may replace
        groups."""
        return -(-self.num_reserved_prompts // self.num_prompts_per_iteration)
