"""The production of groups by rollouts: sampling, limits, and the environment of episodes."""

from typing import Any, Literal

from pydantic import Field

from onbeat.section import Float, Int, PositiveInt, Section


class EnvironmentConfig(Section):
    """An installed program that calls the policy as often as it needs and gives the reward: responses are episodes."""

    name: str = Field(description="an installed entry point of the group `onbeat.environments`")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the environment")
    max_turns: PositiveInt = Field(16, le=1_024, description="calls of the policy in one episode; further ones fail")
    timeout_s: Float = Field(
        120.0, gt=0, le=86_400, description="hard limit for one episode, from its start to its reward"
    )
    memory_limit_mb: Int = Field(2048, ge=64, le=1_048_576, description="hard limit of the process that runs a group")
    max_attempts: PositiveInt = Field(2, le=100, description="tries of one episode in one rollout")


class RolloutConfig(Section):
    num_prompts_per_iteration: PositiveInt = Field(le=10_000, description="groups in one iteration")
    num_samples_per_prompt: PositiveInt = Field(le=1_024, description="responses in one group (G)")
    max_response_tokens: PositiveInt = Field(le=1_048_576, description="a response is cut there")
    temperature: Float = Field(
        1.0, ge=0.01, le=10, description="of sampling; logprobs are of the tempered distribution"
    )
    group_deadline_s: Float = Field(
        300.0, gt=0, le=86_400, description="generating and scoring one group, from its claim"
    )
    max_group_attempts: PositiveInt = Field(
        3, le=100, description="tries of one group (its own errors, deaths of workers) until it counts as failed"
    )
    on_group_failure: Literal["skip", "fail"] = Field(
        "skip", description="a group that cannot be produced is recorded and skipped, or fails the job"
    )
    dispatch: Literal["longest_first", "in_order"] = Field(
        "longest_first",
        description="prompts go out by the length of their responses in the epoch before, or as they come in the data; "
        "what is trained is the same",
    )
