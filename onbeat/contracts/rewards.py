"""The rewards of a job: one, as a table, or several, as a list of tables, of which a response gets the weighted sum."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag, ValidationInfo

from onbeat.contracts.answers import ANSWER_RULES
from onbeat.contracts.section import IS_ACCEPTED, Float, Int, PositiveInt, Section

MAX_REWARDS = 8
HTTP_REWARD, JUDGE_REWARD = "http", "judge"
SERVICE_REWARDS = (HTTP_REWARD, JUDGE_REWARD)  # these ask a service, which rollouts know by its own name
SCORE, RANKING, PAIRS = "score", "ranking", "pairs"
JUDGE_MODES = (SCORE, RANKING, PAIRS)  # one response at a time, all of a group in order, or two against each other
NUM_OPPONENTS, MAX_OPPONENTS = 4, 64  # others that a response is compared with in pairs: by default, and at most
REWARDS_THAT_COMPARE = ("exact", "math", "regex")  # these take the whole answer; regex: the captured group
ZERO = "0; correct the options or the data, unless it wants more than the bare answer, such as a format"
TABLE, LIST = "[table]", "[list]"  # forms of a section, in the locations of Pydantic's errors


def check_rules(rules: int, info: ValidationInfo) -> int:
    """Refuse a job that other rules gave its rewards; records of such jobs can be read."""
    if rules != ANSWER_RULES and info.context != IS_ACCEPTED:
        remedy = "leave answer_rules out to compare by these; rewards of before may differ"
        raise ValueError(f"answers are compared by rules {ANSWER_RULES} here, not by rules {rules}; {remedy}")
    return rules


class RewardConfig(Section):
    name: str = Field(description="name of an installed entry point of the group `onbeat.rewards`, or http or judge")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="keyword arguments of the reward; http and judge: `service` names the service; http: it gets the "
        "others",
    )
    timeout_s: Float = Field(
        10.0,
        gt=0,
        le=3600,
        description="hard time limit for scoring a response; http, and a function of `responses`: for each of a group",
    )
    memory_limit_mb: Int = Field(
        2048, ge=64, le=1_048_576, description="hard memory limit of a scoring process; http: no limit"
    )
    max_attempts: PositiveInt = Field(
        2,
        le=100,
        description="attempts at a response, or at a group that is scored at once, in one rollout",
    )
    weight: Float = Field(
        1.0,
        ge=-1000,
        le=1000,
        description="weight among several rewards, each under `[[reward]]`; a response gets their weighted sum",
    )
    part: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9_.-]{1,40}$",
        description="name among several rewards, for its part of the sum and its curve; default: `name`",
    )

    answer_rules: Annotated[Int, AfterValidator(check_rules)] = Field(
        ANSWER_RULES,
        description="number of the table by which `exact`, `math` and `regex` compare answers, recorded with the job; "
        "leave it out",
    )


def form_of(section: Any) -> str:
    return LIST if isinstance(section, list | tuple) else TABLE


def rewards_in(section: RewardConfig | list[RewardConfig]) -> list[RewardConfig]:
    """Return the rewards of either form. Several have the names of their parts; one alone has none."""
    if isinstance(section, RewardConfig):
        return [section]
    return [reward.model_copy(update={"part": reward.part or reward.name}) for reward in section]


def check_rewards(section: RewardConfig | list[RewardConfig]) -> RewardConfig | list[RewardConfig]:
    """Raise ValueError where the weighted sum, or its parts, could mean two things."""
    if isinstance(section, RewardConfig):
        if section.weight != 1 or section.part is not None:
            raise ValueError("reward.weight: is of several rewards, as is part; write each of them under [[reward]]")
        return section
    parts = [reward.part or reward.name for reward in section]
    if twice := sorted({part for part in parts if parts.count(part) > 1}):
        raise ValueError(f"reward.part: two rewards are both called {twice[0]}; give one of them another part")
    return section


def compares_with_answer(reward: RewardConfig, num_groups: int) -> bool:
    """Return whether the reward needs the prompt's answer. `num_groups`: capture groups in its pattern; regex needs an
    answer only with one.

    >>> compares_with_answer(RewardConfig(name="regex"), 0), compares_with_answer(RewardConfig(name="regex"), 1)
    (False, True)
    """
    return reward.name in REWARDS_THAT_COMPARE and (reward.name != "regex" or num_groups > 0)


def recorded_rules(config: Mapping[str, Any]) -> int | None:
    """Return the ANSWER_RULES recorded with a job; 0 for one of a version without them, None if nothing is compared."""
    sets = (config.get("evaluation") or {}).get("sets") or []
    sources = data if isinstance(data := config.get("data"), list) else []
    sections = [config.get("reward"), *(section.get("reward") for section in (*sets, *sources))]
    rewards = [reward for section in sections for reward in ([section] if isinstance(section, dict) else section or [])]
    rules = [reward.get("answer_rules", 0) for reward in rewards if reward.get("name") in REWARDS_THAT_COMPARE]
    return min(rules, default=None)


OneOrSeveralRewards = Annotated[
    Annotated[RewardConfig, Tag(TABLE)]
    | Annotated[list[RewardConfig], Field(min_length=1, max_length=MAX_REWARDS), Tag(LIST)],
    Discriminator(form_of),
    AfterValidator(check_rewards),
]
