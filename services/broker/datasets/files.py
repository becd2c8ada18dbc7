"""Datasets of rows: JSONL and Parquet files, and splits of a hub.

Rows are read when they are needed: the file may be larger than memory.
"""

import functools
import hashlib
import json
import math
import os
import random
import re
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from datetime import date, time
from decimal import Decimal
from itertools import accumulate
from pathlib import Path
from typing import Any

from onbeat.config import FileData, HubData, RowData
from onbeat.config.data import KEYS_OF_SEVERAL
from onbeat.config.explain import MAX_SHOWN
from onbeat.contracts.answers import IS_NUMBER, is_number, number_text
from services.broker.datasets import DatasetError, DatasetSpec, PromptDataset, PromptItem, is_secret
from services.broker.datasets.examples import to_example
from services.broker.datasets.hub import fetch_split
from services.broker.datasets.lengths import choose_rows, count_prompts
from services.broker.datasets.messages import changes_of_messages, check_columns, pick, to_messages

REMEDY = "upload it with `onbeat data push`, or put it beside the job file, so that `onbeat jobs create` uploads it"
TEACHER_FIELD = "teacher.prompt_field"
BUNDLED = "bundled:"  # start of the path of a file that comes with Onbeat
BUFFER_BYTES = 1 << 20  # size of a read from a column of a Parquet file
MAX_BATCH_ROWS, BATCH_BYTES = 1_000, 32 << 20  # size of a batch of a Parquet file, as its row group estimates it

Row = dict[str, Any]


class FileDataset(PromptDataset):
    """A dataset of rows. The file is found or fetched, and each row is checked when it is read. Raises DatasetError."""

    def __init__(self, data: FileData | HubData, spec: DatasetSpec, data_dir: Path) -> None:
        check_options(data)
        self._data = data
        self._to_item = functools.partial(to_item, teacher_field=spec.teacher_prompt_field)
        if spec.learn is not None:
            self._to_item = functools.partial(to_example, learn=spec.learn, is_chat=spec.is_chat)
        self._path = fetch_split(data, data_dir) if isinstance(data, HubData) else resolve_path(data.path, data_dir)
        self._identity = file_identity(self._path)
        try:
            reader: type[JsonlReader | ParquetReader] = JsonlReader if data.type == "jsonl" else ParquetReader
            self._reader = reader(self._path)
            self.num_rows = num_rows = self._reader.num_rows
            if num_rows == 0:
                raise DatasetError("data.path", f"{data.path} has no rows; write at least one prompt into it")
            if spec.is_held_out and num_rows < spec.num_items:
                key = "warm_start.held_out.num_rows" if spec.learn is not None else "evaluation.num_prompts"
                message = f"{data.path} has {num_rows} rows, and {key} is {spec.num_items}"
                raise DatasetError("data.path", f"{message}; set it to {num_rows} or less")
            self.rows: Sequence[int] = range(num_rows)  # rows that prompts are drawn from
            if spec.model_path:
                self._drop_long(spec, data_dir)
        except OSError as error:
            raise unreadable(data, error) from error
        self._epoch_order = functools.lru_cache(maxsize=2)(functools.partial(epoch_order, spec.seed))

    def _drop_long(self, spec: DatasetSpec, data_dir: Path) -> None:
        # These change no prompt, or no length in a day.
        others = {"order", "difficulty", "max_prompt_tokens", "on_too_long", "now", *KEYS_OF_SEVERAL}
        identity = [str(self._path), self._identity, self._data.model_dump(exclude=others)]
        identity += [(self._data.now or "")[:10], spec.chat_template]
        template = {"arguments": self._data.template_arguments(), "chat_template": spec.chat_template}
        lengths = count_prompts(map(self.to_item, self.rows), spec.model_path, template, identity, data_dir)
        self.rows, self.note = choose_rows(self._data, lengths, self._reader.place)

    @property
    def usable_rows(self) -> Sequence[int]:
        return self.rows

    def is_current(self) -> bool:
        return file_identity(self._path) == self._identity

    def items(self, indices: range) -> list[PromptItem]:
        return self.items_of_rows([self._row_of(index) for index in indices])

    def items_of_rows(self, rows: Sequence[int]) -> list[PromptItem]:
        """Return the prompts of these rows, which are read in the order of the file. Raises DatasetError."""
        try:
            items = {row: self.to_item(row) for row in sorted(set(rows))}
        except OSError as error:
            raise unreadable(self._data, error) from error
        return [items[row] for row in rows]

    def _row_of(self, index: int) -> int:
        epoch, position = divmod(index, len(self.rows))
        return self.rows[
            self._epoch_order(epoch, len(self.rows))[position] if self._data.order == "shuffled" else position
        ]

    def place(self, row: int) -> str:
        """Return the row's place in its file, in words."""
        return self._reader.place(row)

    def to_item(self, row: int) -> PromptItem:
        try:
            return self._to_item(self._reader.row(row), row, self._data)
        except DatasetError as error:
            where = f"{self._data.path}, {self._reader.place(row)}"
            raise DatasetError(error.field, f"{where} {error.message}") from error


def unreadable(data: FileData | HubData, error: OSError) -> DatasetError:
    return DatasetError("data.path", f"{data.path} cannot be read: {error.strerror or error}")


def file_identity(path: Path) -> tuple[int, int, int] | None:
    """Return a value that differs after every change, a swapped link included; None when there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def resolve_path(given: str, data_dir: Path) -> Path:
    """Return the file inside the data folder, or one that comes with Onbeat. Errors reveal nothing about files outside.
    Raises DatasetError."""
    if given.startswith(BUNDLED):
        return bundled_file(given.removeprefix(BUNDLED))
    try:
        root = data_dir.resolve()
        path = (root / given).resolve()
        is_file = path.is_relative_to(root) and path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        shown = given if len(given) <= MAX_SHOWN else f"{given[:MAX_SHOWN]}..."
        reason = error.strerror if isinstance(error, OSError) else error
        raise DatasetError("data.path", f"{shown!r} is not a path: {reason}; give that of a file") from error
    if not path.is_relative_to(root):
        raise DatasetError("data.path", f"{given} is outside the broker's data folder; {REMEDY}")
    if is_secret(path.relative_to(root)):
        raise DatasetError("data.path", f"{given} belongs to the local stack, and no job may read it; {REMEDY}")
    if not is_file:
        raise DatasetError("data.path", f"there is no file {given} in the broker's data folder; {REMEDY}")
    return path


def bundled_file(name: str) -> Path:
    """Return a file that comes with Onbeat. Raises DatasetError."""
    folder = Path(__file__).with_name("bundled")
    names = sorted(path.name for path in folder.glob("*.jsonl"))
    if name not in names:
        known = ", ".join(f"{BUNDLED}{known}" for known in names)
        raise DatasetError("data.path", f"no file {name!r:.{MAX_SHOWN}} comes with Onbeat; there is: {known}")
    return folder / name


def check_options(data: RowData) -> None:
    if data.system_prompt is not None and not data.as_chat:
        raise DatasetError("data.system_prompt", "needs as_chat = true; a plain prompt has no messages")
    if data.answer_pattern is not None:
        if not data.answer_field:
            raise DatasetError("data.answer_pattern", "needs answer_field, in which it finds the answer")
        try:
            re.compile(data.answer_pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise DatasetError("data.answer_pattern", f"is no regular expression: {error}") from error


def to_item(row: Row, index: int, data: RowData, teacher_field: str | None = None) -> PromptItem:
    """Convert row `index` of the file. Raises DatasetError with a message that goes behind the name of the row."""
    check_columns(row, data, teacher_field)
    prompt = pick(row, data.prompt_field, "data.prompt_field")
    answer = find_answer(row, data)
    metadata = {name: value for name, value in row.items() if name not in (data.prompt_field, data.answer_field)}
    messages = to_messages(prompt, data)
    question = next((m.content for m in reversed(messages) if m.role == "user"), prompt)
    context = {"question": question, "answer": to_answer(answer), "metadata": metadata}
    if is_number(answer):
        context[IS_NUMBER] = True
    text = "" if messages else prompt
    item = PromptItem(
        messages=messages, text=text, context=context, row=index, changes=list(changes_of_messages(prompt))
    )
    return item if teacher_field is None else item.model_copy(update=find_teacher_prompt(row, teacher_field, data))


def find_teacher_prompt(row: Row, name: str, data: RowData) -> dict[str, Any]:
    """Return the row's prompt for the teacher, as fields of its item. Raises DatasetError."""
    prompt = pick(row, name, TEACHER_FIELD)
    try:
        messages = to_messages(prompt, data)
    except DatasetError as error:
        raise DatasetError(TEACHER_FIELD, error.message) from error
    return {"teacher_messages": messages, "teacher_text": "" if messages else prompt}


def find_answer(row: Row, data: RowData) -> Any:
    """Return the row's answer, None for data without answers. Raises DatasetError."""
    if not data.answer_field:
        return None
    answer = pick(row, data.answer_field, "data.answer_field")
    if data.answer_pattern is None:
        return answer
    matches = list(re.finditer(data.answer_pattern, str(answer)))
    if not matches:
        shown = repr(str(answer)[-MAX_SHOWN:])
        message = f"has no match of {data.answer_pattern!r} in its answer, which ends with {shown}"
        raise DatasetError("data.answer_pattern", message)
    return (matches[-1].group(1 if matches[-1].re.groups else 0) or "").strip()


def to_answer(answer: Any) -> Any:
    """Convert a number to text, as most rewards compare text, and a date or time to its ISO form; lists and mappings
    stay. Raises DatasetError for NaN and infinity."""
    if isinstance(answer, float | Decimal) and not math.isfinite(answer):
        raise DatasetError("data.answer_field", f"has the answer {answer}; leave such rows out")
    if isinstance(answer, date | time):
        return answer.isoformat()
    return number_text(answer) if is_number(answer) else answer


def epoch_order(seed: int, epoch: int, num_rows: int) -> "array[int]":
    """Return a permutation of the rows: a pure function of (seed, epoch)."""
    order = array("q", range(num_rows))
    digest = hashlib.sha256(f"epoch/{seed}/{epoch}".encode()).digest()
    random.Random(int.from_bytes(digest[:8], "big")).shuffle(order)
    return order


def refuse_other_formats(start: bytes) -> None:
    """Raise DatasetError, naming the format, for formats that are mistaken for JSONL."""
    formats = {
        b"\xff\xfe": "UTF-16",
        b"\xfe\xff": "UTF-16",
        b"\x1f\x8b": "gzip",
        b"PAR1": "Parquet",
        b"PK\x03\x04": "zip",
    }
    for magic, name in formats.items():
        if start.startswith(magic):
            remedy = "set type = 'parquet'" if name == "Parquet" else "write it as plain text in UTF-8"
            raise DatasetError("data.path", f"this is a {name} file, not JSON lines; {remedy}")


class JsonlReader:
    """A reader of one JSON object per line; blank lines do not count. It keeps 16 bytes per row in memory."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        refuse_other_formats(self._file.read(4))
        self._file.seek(0)
        self._starts, self._line_numbers = array("Q"), array("Q")
        start = 0
        for number, line in enumerate(self._file, start=1):
            if line.strip():
                self._starts.append(start)
                self._line_numbers.append(number)
            start += len(line)
        self.num_rows = len(self._starts)

    def place(self, index: int) -> str:
        """Return the row's place for error messages."""
        return f"line {self._line_numbers[index]}"

    def row(self, index: int) -> Row:
        """Read a row. Raises DatasetError."""
        self._file.seek(self._starts[index])
        try:
            row = json.loads(self._file.readline(), object_pairs_hook=without_repeats)
        except (ValueError, RecursionError) as error:
            raise DatasetError("data.path", f"is not valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise DatasetError("data.path", 'is not a JSON object, such as {"prompt": "..."}')
        return row


def without_repeats(pairs: list[tuple[str, Any]]) -> Row:
    """Return a JSON object. Raises ValueError for a key that it has twice, of which readers keep one each."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"it has {next(name for name in names if names.count(name) > 1)!r} twice; keep one of them")
    return row


def replace_floats(kind: Any, by: Any) -> Any:
    """Return a type of Arrow with the type `by` in the place of 32-bit floats. Those in lists, such as embeddings,
    stay: no reward compares a list, and converting them takes long."""
    import pyarrow

    if pyarrow.types.is_float32(kind):
        return by
    if pyarrow.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        return pyarrow.struct([field.with_type(replace_floats(field.type, by)) for field in fields])
    return kind


def as_written(batch: Any) -> Any:
    """Return a batch whose 32-bit floats are the shortest numbers that mean them: 0.1, not 0.10000000149011612."""
    import pyarrow

    for number, field in enumerate(batch.schema):
        if (text := replace_floats(field.type, pyarrow.string())) != field.type:
            column = batch.column(number).cast(text).cast(replace_floats(field.type, pyarrow.float64()))
            batch = batch.set_column(number, field.name, column)
    return batch


class ParquetReader:
    """A reader that holds a batch of rows at a time, however large a row group is.

    Rows that are read in the order of the file cost one pass through it; a step back begins the row group again.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        try:
            self._file = pyarrow.parquet.ParquetFile(path, buffer_size=BUFFER_BYTES)
        except pyarrow.ArrowException as error:
            raise DatasetError("data.path", f"not a Parquet file: {error}") from error
        groups = [self._file.metadata.row_group(group) for group in range(self._file.metadata.num_row_groups)]
        self.num_rows = self._file.metadata.num_rows
        self._group_starts = [0, *accumulate(group.num_rows for group in groups)]
        self._batch_rows = [max(1, BATCH_BYTES * group.num_rows // (group.total_byte_size + 1)) for group in groups]
        self._group, self._batch_start, self._batch = -1, 0, pyarrow.table({})

    def place(self, index: int) -> str:
        return f"row {index}"

    def row(self, index: int) -> Row:
        group = bisect_right(self._group_starts, index) - 1
        if group != self._group or index < self._batch_start:
            size = min(MAX_BATCH_ROWS, self._batch_rows[group])
            self._batches = self._file.iter_batches(size, row_groups=[group], use_threads=False)
            self._group, self._batch_start = group, self._group_starts[group]
            self._batch = as_written(next(self._batches))
        while index >= self._batch_start + self._batch.num_rows:
            self._batch_start += self._batch.num_rows
            self._batch = as_written(next(self._batches))
        rows: list[Row] = self._batch.slice(index - self._batch_start, 1).to_pylist()
        return rows[0]
