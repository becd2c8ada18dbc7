"""The data of a job: where its prompts come from."""

from typing import Annotated, Any, Literal

from pydantic import Field

from onbeat.section import PositiveInt, Section


class ReasoningGymData(Section):
    type: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = Field(description="a reasoning_gym dataset name, such as `chain_sum`")
    options: dict[str, Any] = Field(default_factory=dict, description="the task's own options, such as `max_terms`")
    system_prompt: str | None = Field(None, description="put before every question as a system message")


class RowData(Section):
    """How a row becomes a prompt."""

    prompt_field: str = Field(
        "prompt", description="a string, or a list of {role, content} messages; `a.b` is field b of the mapping a"
    )
    answer_field: str | None = Field("answer", description="passed to the reward as `answer`; null: no answers")
    answer_pattern: str | None = Field(
        None,
        description="a regular expression: the answer is its last match in the answer's field, or the first group of "
        "it; GSM8K: `#### (.+)`",
    )
    as_chat: bool = Field(True, description="wrap a string prompt into one user message and apply the chat template")
    system_prompt: str | None = Field(None, description="put before every prompt as a system message")
    shuffle: bool = Field(True, description="draw in a new seeded order in every epoch")
    max_prompt_tokens: PositiveInt | None = Field(
        None, description="longer prompts are not trained; counted when the job is submitted, as the model gets them"
    )
    on_too_long: Literal["drop", "refuse"] = Field("drop", description="leave such prompts out, or refuse the job")


class FileData(RowData):
    type: Literal["jsonl", "parquet"]
    path: str = Field(description="the file, on the broker's machine, inside its data folder")


class HubData(RowData):
    """A data set of the Hugging Face hub; the broker needs the package `datasets`."""

    type: Literal["hf"]
    path: str = Field(
        description="its id on the hub, `org/name`; or a folder of that shape in the broker's data folder"
    )
    subset: str | None = Field(None, description="its configuration, where it has several; GSM8K: `main`")
    split: str = Field("train", description="of the data set")
    revision: str | None = Field(None, description="a commit, tag or branch; default: the newest at the first use")


DataConfig = Annotated[ReasoningGymData | FileData | HubData, Field(discriminator="type")]
