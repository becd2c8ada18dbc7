"""The data of a job: where its prompts come from. One source, as a table, or several, as a list of tables."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from onbeat.config.rollout import EnvironmentConfig
from onbeat.config.templates import TemplateArguments
from onbeat.contracts.rewards import LIST, TABLE, OneOrSeveralRewards, form_of
from onbeat.contracts.section import Float, PositiveInt, Section
from onbeat.contracts.slots import MAX_SOURCES, Slots
from onbeat.objectives.base.objective import check_rule

MAX_LEVELS = 16
DIFFICULTY = "difficulty"


class DifficultyConfig(Section):
    """Settings of `order = "difficulty"`, which chooses prompts by the outcomes of earlier ones."""

    explore: Float = Field(
        0.2,
        gt=0,
        le=1,
        description="share of the prompts that are chosen to learn about the data: rows that no iteration had yet, "
        "then those not seen for longest; or the levels in turn",
    )
    decay: Float = Field(
        0.5, ge=0, le=1, description="factor of what a row's or level's earlier visits count, at each new visit"
    )
    prior: Float = Field(
        0.5,
        gt=0,
        le=100,
        description="solved responses, and as many unsolved ones, that every estimate of a solved share begins with",
    )
    band: tuple[Float, Float] = Field(
        (0.0, 1.0),
        description="lowest and highest solved share of the rows that are chosen for their expected signal",
    )

    @field_validator("band")
    @classmethod
    def check_band(cls, band: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= band[0] < band[1] <= 1:
            raise ValueError(
                f"{list(band)} is no band of solved shares; give two from 0 to 1, the lower one first: [0.1, 0.9]"
            )
        return band


class SourceData(TemplateArguments):
    """The part of a data set that says what it is among several sources."""

    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$",
        description="name among several sources, each under `[[data]]`, which every group records",
    )
    weight: Float = Field(
        1.0,
        ge=0,
        le=1000,
        description="weight among several sources: after every prompt, each has had its share of them to within one; "
        "0: no prompts",
    )
    max_response_tokens: PositiveInt | None = Field(
        None,
        description="tokens that a response to this source's prompts may have, with several sources; default, and the "
        "most: `rollout.max_response_tokens`",
    )
    reward: OneOrSeveralRewards | None = Field(
        None,
        description="one or several rewards of this source, whose prompts are then answered in one turn, with several "
        "sources; default: those of the job",
    )
    environment: EnvironmentConfig | None = Field(
        None,
        exclude_if=lambda environment: environment is None,
        description="environment that plays this source's prompts, with several sources; default: that of the job, "
        "unless the source has its own `reward`",
    )
    solved_at: Float | None = Field(
        None,
        description="reward from which a response to this source's prompts counts as solved, with several sources; "
        "default: that of the job",
    )
    signal: Annotated[str, AfterValidator(check_rule)] | None = Field(
        None,
        description="difference between responses that makes a group of this source teach, with several sources; "
        "default: `objective.signal`",
    )

    @property
    def is_one_of_several(self) -> bool:
        """True if it has a key that only several sources have."""
        return any(getattr(self, name) != field.get_default() for name, field in KEYS_OF_SEVERAL.items())


KEYS_OF_SEVERAL = {
    name: field for name, field in SourceData.model_fields.items() if name not in TemplateArguments.model_fields
}


class OrderedData(SourceData):
    """The part of a data set that says which prompt comes when."""

    difficulty: DifficultyConfig | None = Field(
        None, description='settings of `order = "difficulty"`; default: those of its keys'
    )

    @property
    def chooses(self) -> DifficultyConfig | None:
        """The settings by which prompts are chosen when an iteration opens; None: their order is known before."""
        return (self.difficulty or DifficultyConfig()) if getattr(self, "order", "") == DIFFICULTY else None

    @model_validator(mode="after")
    def check_order(self) -> "OrderedData":
        if self.difficulty is not None and self.chooses is None:
            raise ValueError("difficulty: has no effect without order = 'difficulty'; set that, or leave it out")
        return self


class ReasoningGymData(OrderedData):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(description="name of a reasoning_gym dataset, such as `chain_sum`")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the task, such as `max_terms`")
    system_prompt: str | None = Field(None, description="system message before every question")
    order: Literal["in_order", "difficulty"] = Field(
        "in_order",
        description="in_order: new questions of one kind; difficulty: the level of `levels` that teaches most, by the "
        "outcomes so far",
    )
    levels: list[dict[str, Any]] = Field(
        [],
        max_length=MAX_LEVELS,
        description='options of the levels, from easy to hard, each on top of `options`; for `order = "difficulty"`',
    )

    @model_validator(mode="after")
    def check_levels(self) -> "ReasoningGymData":
        if self.chooses is not None and len(self.levels) < 2:
            raise ValueError(
                "levels: order = 'difficulty' chooses between levels, since generated questions never come again; give "
                "at least two, such as [{ max_terms = 2 }, { max_terms = 4 }]"
            )
        if self.levels and self.chooses is None:
            raise ValueError("levels: have no effect without order = 'difficulty'; set that, or leave them out")
        return self


class RowData(OrderedData):
    """The part of a data set that says how a row becomes a prompt."""

    prompt_field: str = Field(
        "prompt",
        description="field with the prompt: a string, or a list of {role, content} messages; `a.b` is field b of "
        "the mapping a",
    )
    answer_field: Annotated[str, BeforeValidator(lambda value: "" if value is None else value)] = Field(
        "answer", description="field with the answer, which the reward gets as `answer`; empty: there are no answers"
    )
    answer_pattern: str | None = Field(
        None,
        description="regular expression whose last match in the answer's field is the answer; if it has a group, the "
        "first group of that match. GSM8K: `#### (.+)`",
    )
    as_chat: bool = Field(True, description="wrap a string prompt in a user message and apply the chat template")
    system_prompt: str | None = Field(None, description="system message before every prompt")
    metadata_only: list[str] = Field(
        [],
        max_length=100,
        description="columns that look like inputs of the model (`images`, `tools`, ...) and are for the reward alone; "
        "other jobs with such columns are refused, because the model would not see them",
    )
    order: Literal["in_order", "shuffled", "difficulty"] = Field(
        "shuffled",
        description="order of the rows. in_order: as in the file; shuffled: a new seeded order in every epoch; "
        "difficulty: those first from which most signal is expected, by the outcomes so far",
    )
    max_prompt_tokens: PositiveInt | None = Field(
        None,
        description="longest prompt to train on, in tokens, chat template included; checked when the job is submitted",
    )
    on_too_long: Literal["drop", "refuse"] = Field(
        "drop", description="what happens to longer prompts: leave them out, or refuse the job"
    )

    @model_validator(mode="before")
    @classmethod
    def read_shuffle(cls, section: Any) -> Any:
        """Read `shuffle`, which older jobs have in the place of `order`."""
        if not isinstance(section, dict) or "shuffle" not in section:
            return section
        if "order" in section or not isinstance(section["shuffle"], bool):
            raise ValueError(
                "shuffle: is the old name of order; use order = 'shuffled' or 'in_order', and leave it out"
            )
        others = {name: value for name, value in section.items() if name != "shuffle"}
        return {**others, "order": "shuffled" if section["shuffle"] else "in_order"}


class FileData(RowData):
    type: Literal["jsonl", "parquet"]
    path: str = Field(
        description="path of the file in the data folder of the broker, or `bundled:NAME` of one that comes with Onbeat"
    )


class HubData(RowData):
    """A data set on the Hugging Face hub. The broker needs the package `datasets`."""

    type: Literal["hf"]
    path: str = Field(
        description="id on the hub, `org/name`, or a folder in the same layout in the data folder of the broker"
    )
    subset: str | None = Field(None, description="configuration of the data set, if it has several; GSM8K: `main`")
    split: str = Field("train", description="split of the data set")
    revision: str | None = Field(None, description="commit, tag or branch; default: the newest commit at the first use")


DataConfig = Annotated[ReasoningGymData | FileData | HubData, Field(discriminator="type")]


def check_sources(section: DataConfig | list[DataConfig]) -> DataConfig | list[DataConfig]:
    """Raise ValueError where sources could not be told apart, or could not take turns."""
    if not isinstance(section, list):
        if section.is_one_of_several:
            keys = ", ".join(KEYS_OF_SEVERAL)
            raise ValueError(f"data: {keys} are keys of several sources; write each of these under [[data]]")
        return section
    names = [source.name for source in section]
    if None in names:
        raise ValueError(f"data.{names.index(None)}.name: is required for each of several sources; give it a name")
    if twice := sorted({str(name) for name in names if names.count(name) > 1}):
        raise ValueError(f"data.name: two sources are both called {twice[0]}; give one of them another name")
    if len({getattr(source, "as_chat", True) for source in section}) > 1:
        raise ValueError("data.as_chat: some sources are conversations and some plain texts; set the same in all")
    try:
        Slots.by_weights([source.weight for source in section])
    except ValueError as error:
        raise ValueError(f"data.weight: {error}") from error
    return section


OneOrSeveralSources = Annotated[
    Annotated[DataConfig, Tag(TABLE)]
    | Annotated[list[DataConfig], Field(min_length=1, max_length=MAX_SOURCES), Tag(LIST)],
    Discriminator(form_of),
    AfterValidator(check_sources),
]
