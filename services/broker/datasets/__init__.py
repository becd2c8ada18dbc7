"""The datasets that a job's prompts come from. A dataset is a sequence that is a pure function of its spec.

Data is only touched in a child process (`process`): generators and parsers run user-chosen options and files, and none
of them may stall or take down the broker.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from onbeat.config import DataConfig, FileData, HeldOutSet, JobConfig, ReasoningGymData, RowData
from onbeat.config.data import KEYS_OF_SEVERAL
from onbeat.config.templates import TemplateArguments
from onbeat.contracts.data_folder import SECRET_NAMES
from onbeat.contracts.errors import OnbeatError
from onbeat.contracts.examples import Learn
from onbeat.contracts.records import RowCounts
from onbeat.contracts.rewards import RewardConfig


class DatasetError(OnbeatError):
    """The data cannot be used. The error names the field of the job that is to blame, and what to do."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


def is_secret(path: PurePath) -> bool:
    """Return whether a path, relative to the data folder, is a local stack's own: no job may read its passwords."""
    return bool(path.parts) and path.parts[0].casefold() in SECRET_NAMES


def moved_field(field: str, section: str) -> str:
    """Return the field to blame where the section `data` is another one of the job, such as `data.1`.

    >>> moved_field("data.path", "data.1"), moved_field("teacher.prompt_field", "data.1")
    ('data.1.path', 'teacher.prompt_field')
    """
    return section + field.removeprefix("data") if field.partition(".")[0] == "data" else field


class ChatMessage(BaseModel):
    role: str
    content: str


class PromptItem(BaseModel):
    """A prompt: either `messages` or `text`, and the context that its reward needs."""

    messages: list[ChatMessage] = []
    text: str = ""
    teacher_messages: list[ChatMessage] = []  # prompt of the teacher, in place of both; none: the same
    teacher_text: str = ""
    context: dict[str, Any]
    row: int | None = None  # the same each time the data repeat this prompt; None: they never do
    source: str = ""  # name of its source, where a job has several
    changes: list[str] = Field([], exclude=True)  # changes of the row's messages, for those who count rows


class DatasetSpec(BaseModel):
    """The inputs that a dataset depends on, besides the data folder."""

    model_config = ConfigDict(frozen=True)

    data: DataConfig
    seed: int
    num_items: int  # the total that the job will take
    model_path: str = ""  # model of the tokenizer, where prompts are counted
    chat_template: str | None = None  # the job's own, where prompts are counted
    is_held_out: bool = False  # no row may come twice
    learn: Learn | None = None  # answers to learn, of rows that are examples; None: rows are prompts
    is_chat: bool = True  # examples are shown by a chat template
    teacher_prompt_field: str | None = None  # field with the teacher's prompt; None: it reads the policy's

    @classmethod
    def of_job(cls, config: JobConfig, source: int = 0) -> "DatasetSpec":
        """Return the spec of a job's source, by its place."""
        data, rollout = config.sources[source][1], config.rollout
        num_items = config.schedule.num_iterations * rollout.num_reserved_prompts
        if isinstance(config.data, list) or config.chooses_prompts:  # an upper bound: that of a source with all slots
            num_slots = config.schedule.num_iterations * rollout.num_prompts_per_iteration
            num_items = num_slots * rollout.num_rows_per_slot
        is_counted = isinstance(data, RowData) and data.max_prompt_tokens is not None
        model_path = config.model.path if is_counted else ""
        # Values that change no prompt are left out, so that more jobs share the data set.
        changes: dict[str, Any] = {name: getattr(config.rendering, name) for name in TemplateArguments.model_fields}
        changes |= {name: field.get_default() for name, field in KEYS_OF_SEVERAL.items()}
        if isinstance(data, RowData) and data.chooses is not None:  # the rows are chosen elsewhere
            changes |= {"order": "in_order", "difficulty": None}
        changes |= {} if is_counted else {"now": None}
        return cls(
            data=data.model_copy(update=changes),
            seed=config.seed,
            num_items=num_items,
            model_path=model_path,
            chat_template=config.model.chat_template if is_counted else None,
            teacher_prompt_field=config.teacher.prompt_field if config.teacher is not None else None,
        )

    @classmethod
    def of_examples(cls, config: JobConfig) -> "DatasetSpec":
        """Return the spec of the job's file of examples."""
        assert config.warm_start is not None
        num_items = config.num_supervised * config.warm_start.num_rows_per_iteration
        return cls._of_rows(config, config.warm_start.data.rows, num_items)

    @classmethod
    def of_held_out_examples(cls, config: JobConfig) -> "DatasetSpec | None":
        """Return the spec of the rows on which the loss is measured, in the order of their file; None without."""
        if config.warm_start is None or (held_out := config.warm_start.held_out) is None:
            return None
        data = held_out.data.rows.model_copy(update={"order": "in_order"})
        return cls._of_rows(config, data, held_out.num_rows, is_held_out=True)

    @classmethod
    def _of_rows(cls, config: JobConfig, data: FileData, num_items: int, is_held_out: bool = False) -> "DatasetSpec":
        assert config.warm_start is not None
        return cls(
            data=data,
            seed=config.seed,
            num_items=num_items,
            is_held_out=is_held_out,
            learn=config.warm_start.learn,
            is_chat=getattr(config.rendering, "as_chat", True),
        )

    def of_level(self, level: int) -> "DatasetSpec":
        """Return the spec of one level of a generated task."""
        assert isinstance(self.data, ReasoningGymData)
        changes = {"options": {**self.data.options, **self.data.levels[level]}, "levels": [], "order": "in_order"}
        return self.model_copy(update={"data": self.data.model_copy(update={**changes, "difficulty": None})})

    @classmethod
    def of_evaluation(cls, held_out: HeldOutSet, job_seed: int) -> "DatasetSpec":
        """Return the spec of held-out data. A file is read in its own order. Procedural items come from seeds that
        training never reaches: item i of a dataset is made from seed + i, and a job has fewer than 2**31 prompts."""
        data = held_out.data
        if isinstance(data, RowData):
            data = data.model_copy(update={"order": "in_order"})
        return cls(data=data, seed=(job_seed + 2**31) % 2**32, num_items=held_out.num_prompts, is_held_out=True)


class Section(BaseModel):
    """A data set of the job, by its field, and the rewards that score it, by theirs."""

    field: str
    spec: DatasetSpec
    rewards: dict[str, RewardConfig]


@dataclass
class Survey:
    """The result of a look at all rows."""

    counts: list[RowCounts] = field(default_factory=list)
    complaints: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        counts = [count.model_dump() for count in self.counts]
        return {"counts": counts, "complaints": self.complaints, "notes": self.notes}


class PromptDataset:
    note = ""  # note about the data for the job's events; '' for none

    def items(self, indices: range) -> list[PromptItem]:
        """Return the prompts of the job with these numbers, from 0 to num_items - 1. Raises DatasetError."""
        raise NotImplementedError

    def items_of_rows(self, rows: Sequence[int]) -> list[PromptItem]:
        """Return the prompts of these rows; of generated data, those with these numbers. Raises DatasetError."""
        return [self.item(row) for row in rows]

    def item(self, index: int) -> PromptItem:
        return self.items(range(index, index + 1))[0]

    @property
    def usable_rows(self) -> Sequence[int]:
        """The rows that prompts are drawn from, ascending; a range from 0 if none was left out, and for generated data
        an empty one."""
        return range(0)

    def is_current(self) -> bool:
        """Return False when the underlying data has changed and the dataset must be opened again."""
        return True
