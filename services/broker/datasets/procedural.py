"""Procedural tasks of reasoning_gym: item i is generated from (seed, i) alone."""

import difflib
import json
from typing import Any

from onbeat.config import ReasoningGymData
from onbeat.task_options import find_code
from services.broker.datasets import ChatMessage, DatasetError, PromptItem

RESERVED_OPTIONS = {"seed": "set the job's seed", "size": "it follows from the number of iterations and prompts"}


class ReasoningGymDataset:
    """A dataset of generated tasks. The unmodified question is the user message."""

    note = ""

    def __init__(self, data: ReasoningGymData, seed: int, num_items: int, dataset: Any) -> None:
        self._data, self._seed, self._num_items = data, seed, num_items
        self._dataset = dataset

    @classmethod
    def open(cls, data: ReasoningGymData, seed: int, num_items: int) -> "ReasoningGymDataset":
        """Open the task's dataset. Raises DatasetError for an unknown task or for options that the task refuses."""
        from reasoning_gym.factory import DATASETS, create_dataset

        if data.task not in DATASETS:
            raise DatasetError("data.task", f"reasoning_gym has no task {data.task!r}; {nearest(data.task, DATASETS)}")
        for name, remedy in RESERVED_OPTIONS.items():
            if name in data.options:
                raise DatasetError(f"data.options.{name}", f"cannot be set here: {remedy}")
        known = sorted(set(DATASETS[data.task][1].__dataclass_fields__) - set(RESERVED_OPTIONS))
        for name in data.options:
            if name not in known:
                raise DatasetError(
                    f"data.options.{name}", f"task {data.task} has no such option; it has: {', '.join(known)}"
                )
        if (code := find_code(data.options)) is not None:
            message = f"{code[:80]!r} may be code, which tasks could run: options are numbers, words and operators"
            raise DatasetError("data.options", message)
        try:
            dataset = create_dataset(data.task, seed=seed, size=num_items, **data.options)
        except (ValueError, TypeError, AssertionError) as error:
            reason = str(error) or type(error).__name__
            raise DatasetError(
                "data.options", f"task {data.task} refuses them: {reason}; options: {', '.join(known)}"
            ) from error
        return cls(data, seed, num_items, dataset)

    def is_current(self) -> bool:
        return True

    def items(self, indices: range) -> list[PromptItem]:
        return [self.item(index) for index in indices]

    def item(self, index: int) -> PromptItem:
        entry = self._dataset[index]
        context = {name: entry[name] for name in ("question", "answer", "metadata")}
        # With these a scorer can build the same dataset and entry again, where JSON is not faithful enough.
        context |= {"task": self._data.task, "options": self._data.options}
        context |= {"seed": self._seed, "size": self._num_items, "index": index}
        messages = [ChatMessage(role="user", content=entry["question"])]
        if self._data.system_prompt is not None:
            messages.insert(0, ChatMessage(role="system", content=self._data.system_prompt))
        return PromptItem(messages=messages, context=json.loads(json.dumps(context, default=str)))


def nearest(wrong: str, known: Any) -> str:
    """Suggest known names instead of an unknown one."""
    close = difflib.get_close_matches(wrong, list(known), n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"there are: {', '.join(sorted(known))}"
