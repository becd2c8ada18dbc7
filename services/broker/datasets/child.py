"""The process that touches data: one JSON request per line in, one JSON answer per line out, until standard input ends.

`process` starts it. A request that takes longer than its limit ends this process, even if the broker is gone.
"""

import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal, TextIO

from pydantic import BaseModel, TypeAdapter

from onbeat.config import ReasoningGymData
from onbeat.process.confine import MEBIBYTE, lower_limits
from services.broker.datasets import DatasetError, DatasetSpec, PromptDataset, Section, moved_field

MAX_OPEN = 24  # datasets kept open; the levels of a generated task are some each
SHARE_OF_TIME = 0.5  # share of a survey; opening the data takes some time, too


class ReadRequest(BaseModel):
    spec: DatasetSpec
    first: int
    count: int
    timeout_s: float


class RowsRequest(BaseModel):
    """A request for the prompts of these rows."""

    spec: DatasetSpec
    rows: list[int]
    timeout_s: float


class UsableRequest(BaseModel):
    """A request for the rows that prompts may be drawn from."""

    spec: DatasetSpec
    has_rows: Literal[True]
    timeout_s: float


class SurveyRequest(BaseModel):
    sections: list[Section]
    timeout_s: float


class PatternRequest(BaseModel):
    pattern: str
    timeout_s: float


class TasksRequest(BaseModel):
    """A request for the names of all procedural tasks."""

    has_tasks: Literal[True]
    timeout_s: float


AnyRequest = ReadRequest | RowsRequest | UsableRequest | SurveyRequest | PatternRequest | TasksRequest
REQUEST: TypeAdapter[AnyRequest] = TypeAdapter(AnyRequest)


def main() -> None:
    data_dir, memory_mb = Path(sys.argv[1]), int(sys.argv[2])
    lower_limits({resource.RLIMIT_AS: memory_mb * MEBIBYTE})
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process
    answers = take_stdout()
    open_datasets: dict[str, PromptDataset] = {}
    for line in sys.stdin:
        request = REQUEST.validate_json(line)
        signal.setitimer(signal.ITIMER_REAL, request.timeout_s)
        if isinstance(request, PatternRequest):
            answer = check_pattern(request.pattern)
        elif isinstance(request, TasksRequest):
            answer = {"tasks": list_tasks()}
        elif isinstance(request, SurveyRequest):
            answer = answer_survey(request, data_dir, open_datasets)
        else:
            answer = answer_request(request, data_dir, open_datasets)
        text = json.dumps(answer, default=str)  # rows may have what JSON does not, such as dates
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(text + "\n")
        answers.flush()


def take_stdout() -> TextIO:
    """Keep standard output to ourselves; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer_request(
    request: ReadRequest | RowsRequest | UsableRequest, data_dir: Path, open_datasets: dict[str, PromptDataset]
) -> dict[str, Any]:
    try:
        dataset = find_dataset(request.spec, data_dir, open_datasets)
        if isinstance(request, UsableRequest):
            rows = dataset.usable_rows
            return {"count": len(rows)} if isinstance(rows, range) else {"rows": list(rows)}
        if isinstance(request, RowsRequest):
            items = dataset.items_of_rows(request.rows)
        else:
            items = dataset.items(range(request.first, request.first + request.count))
    except DatasetError as error:
        return {"error": {"field": error.field, "message": error.message}}
    return {"items": [item.model_dump() for item in items], "note": dataset.note}


def answer_survey(request: SurveyRequest, data_dir: Path, open_datasets: dict[str, PromptDataset]) -> dict[str, Any]:
    """Look at all rows of the data sets that have rows, for as long as there is time."""
    from services.broker.datasets.files import FileDataset
    from services.broker.datasets.survey import survey

    deadline = time.monotonic() + SHARE_OF_TIME * request.timeout_s
    sections, complaints = [], []
    for section in request.sections:
        try:
            dataset = find_dataset(section.spec, data_dir, open_datasets)
        except DatasetError as error:
            complaints.append((moved_field(error.field, section.field), error.message))
            continue
        if isinstance(dataset, FileDataset):
            sections.append((section, dataset))
    result = survey(sections, deadline)
    result.complaints = complaints + result.complaints
    return result.to_json()


def check_pattern(pattern: str) -> dict[str, Any]:
    """Return why the pattern is not a regular expression ('' if it is one), and how many groups it has."""
    try:
        return {"problem": "", "num_groups": re.compile(pattern).groups}
    except (re.error, RecursionError, OverflowError) as error:
        return {"problem": f"is no regular expression: {error}", "num_groups": 0}


def list_tasks() -> list[str]:
    """Return the names of reasoning_gym's tasks; none where it is not installed."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return []
    return sorted(DATASETS)


def open_dataset(spec: DatasetSpec, data_dir: Path) -> PromptDataset:
    """Open the dataset; imports only what the type of data needs. Raises DatasetError."""
    if not isinstance(spec.data, ReasoningGymData):
        from services.broker.datasets.files import FileDataset

        return FileDataset(spec.data, spec, data_dir)
    from services.broker.datasets.procedural import ReasoningGymDataset

    return ReasoningGymDataset(spec.data, spec)


def find_dataset(spec: DatasetSpec, data_dir: Path, open_datasets: dict[str, PromptDataset]) -> PromptDataset:
    key = spec.model_dump_json()
    dataset = open_datasets.pop(key, None)
    if dataset is None or not dataset.is_current():
        dataset = open_dataset(spec, data_dir)
    open_datasets[key] = dataset  # the most recent one is last
    while len(open_datasets) > MAX_OPEN:
        del open_datasets[next(iter(open_datasets))]
    return dataset


if __name__ == "__main__":
    main()
