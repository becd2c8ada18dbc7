"""The data of a job: where its prompts come from."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from onbeat.config.templates import TemplateArguments
from onbeat.contracts.section import PositiveInt


class ReasoningGymData(TemplateArguments):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(description="name of a reasoning_gym dataset, such as `chain_sum`")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the task, such as `max_terms`")
    system_prompt: str | None = Field(None, description="system message before every question")


class RowData(TemplateArguments):
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
    shuffle: bool = Field(True, description="use a new seeded order in every epoch")
    max_prompt_tokens: PositiveInt | None = Field(
        None,
        description="longest prompt to train on, in tokens, chat template included; checked when the job is submitted",
    )
    on_too_long: Literal["drop", "refuse"] = Field(
        "drop", description="what happens to longer prompts: leave them out, or refuse the job"
    )


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
