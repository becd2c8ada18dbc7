"""Procedural tasks of reasoning_gym: item i is generated from (seed, i) and the options of its level alone."""

from functools import partial
from typing import Any

from onbeat.config import ReasoningGymData
from onbeat.contracts.suggestions import close_names, suggest
from onbeat.contracts.task_options import find_code
from onbeat.process.extras import require_extra
from services.broker.datasets import ChatMessage, DatasetError, DatasetSpec, PromptDataset, PromptItem

RESERVED_OPTIONS = {"seed": "set the job's seed", "size": "it follows from the number of iterations and prompts"}


class ReasoningGymDataset(PromptDataset):
    """A dataset of generated tasks, of the easiest level where there are some. The unmodified question is the user
    message.

    Raises DatasetError for an unknown task or for options that the task refuses.
    """

    def __init__(self, data: ReasoningGymData, spec: DatasetSpec) -> None:
        try:
            from reasoning_gym.factory import DATASETS, create_dataset
        except ImportError:
            require_extra("reasoning-gym", user="this type of data", error=partial(DatasetError, "data.type"))
            raise

        if data.task not in DATASETS:
            hint = suggest(close_names(data.task, DATASETS), DATASETS)
            raise DatasetError("data.task", f"reasoning_gym has no task {data.task!r}; {hint}")
        known = sorted(set(DATASETS[data.task][1].__dataclass_fields__) - set(RESERVED_OPTIONS))
        self._data, self._arguments = data, {"seed": spec.seed, "size": spec.num_items}
        check_options("data.options", data.task, data.options, known)
        for number, level in enumerate(data.levels):
            check_options(f"data.levels.{number}", data.task, level, known)
        self._options: dict[str, Any] = {}
        for number in reversed(range(max(1, len(data.levels)))):  # the last one that is made is the easiest
            field = f"data.levels.{number}" if data.levels else "data.options"
            self._options = {**data.options, **(data.levels[number] if data.levels else {})}
            try:
                self._dataset = create_dataset(data.task, **self._arguments, **self._options)
            except (ValueError, TypeError, AssertionError) as error:
                message = f"task {data.task} refuses them: {str(error) or type(error).__name__}"
                raise DatasetError(field, f"{message}; options: {', '.join(known)}") from error

    def items(self, indices: range) -> list[PromptItem]:
        return [self._generate(index) for index in indices]

    def _generate(self, index: int) -> PromptItem:
        entry = self._dataset[index]
        context = {name: entry[name] for name in ("question", "answer", "metadata")}
        # With these a scorer can build the same dataset and entry again, where JSON is not faithful enough.
        context |= {"task": self._data.task, "options": self._options, **self._arguments, "index": index}
        messages = [ChatMessage(role="user", content=entry["question"])]
        if self._data.system_prompt is not None:
            messages.insert(0, ChatMessage(role="system", content=self._data.system_prompt))
        return PromptItem(messages=messages, context=context)


def check_options(field: str, task: str, options: dict[str, Any], known: list[str]) -> None:
    """Raise DatasetError for options that a task does not have, or that could be code."""
    for name in options:
        if name in RESERVED_OPTIONS:
            raise DatasetError(f"{field}.{name}", f"cannot be set here: {RESERVED_OPTIONS[name]}")
        if name not in known:
            message = f"task {task} has no such option; it has: {', '.join(known)}"
            raise DatasetError(f"{field}.{name}", message)
    if (code := find_code(options)) is not None:
        message = f"{code[:80]!r} may be code, which tasks could run: options are numbers, words and operators"
        raise DatasetError(field, message)
