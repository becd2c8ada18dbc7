"""The tokens of prompts, counted by a process of the trainer's code: the broker's own imports no tokenizer.

The counts of a file are kept in `DATA_DIR/datasets/.lengths`, as far as that can be written.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onbeat.config import RowData
from onbeat.contracts.records import DATASETS_FOLDER
from onbeat.process.children import MAX_LAST_WORDS, command_of, last_words
from services.broker.datasets import DatasetError, PromptItem

COUNTER = "services.trainer.prompt_lengths"
FIELD = "data.max_prompt_tokens"


def count_prompts(
    items: Iterator[PromptItem], model_path: str, template: dict[str, Any], identity: object, data_dir: Path
) -> "array[int]":
    """Return the number of tokens of each prompt. `template`: the first line for the counter. `identity`: differs
    where the prompts do.

    Raises DatasetError where the model's tokenizer cannot be loaded here.
    """
    digest = hashlib.sha256(json.dumps([model_path, identity], default=str).encode()).hexdigest()[:32]
    kept = data_dir / DATASETS_FOLDER / ".lengths" / digest
    with contextlib.suppress(OSError, ValueError):
        return array("i", kept.read_bytes())
    lengths = array("i", count_in_process(items, model_path, template))
    with contextlib.suppress(OSError):  # the data folder may be read-only
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")  # other processes may count the same prompts
        draft.write_bytes(lengths.tobytes())
        draft.replace(kept)
    return lengths


def count_in_process(items: Iterator[PromptItem], model_path: str, template: dict[str, Any]) -> list[int]:
    if importlib.util.find_spec("transformers") is None:
        message = "prompts are counted with the model's tokenizer, and the package `transformers` is not installed "
        message += "where the broker runs; leave too long prompts out of the data, and this away"
        raise DatasetError(FIELD, message)
    with tempfile.TemporaryFile("w+", encoding="utf-8") as prompts:
        prompts.write(json.dumps(template) + "\n")
        for item in items:
            prompts.write(json.dumps(item.model_dump(include={"messages", "text"})) + "\n")
        prompts.flush()
        prompts.seek(0)
        command = command_of(COUNTER, model_path)
        done = subprocess.run(command, stdin=prompts, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = last_words(done.stderr)[:MAX_LAST_WORDS] or "it says nothing"
        message = f"the tokenizer of {model_path} cannot be used where the broker runs: {reason}"
        raise DatasetError(FIELD, f"{message}; leave too long prompts out of the data, and this away")
    return list(map(int, done.stdout.split()))


def choose_rows(data: RowData, lengths: "array[int]", place: Any) -> tuple["array[int]", str]:
    """Return the rows that are short enough, and a note for the job's events about the others ('' if there are none).

    `place`: names a row. Raises DatasetError if the job is to be refused.
    """
    assert data.max_prompt_tokens is not None
    kept = array("q", (row for row, length in enumerate(lengths) if length <= data.max_prompt_tokens))
    num_dropped = len(lengths) - len(kept)
    if not num_dropped:
        return kept, ""
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    problem = (
        f"{num_dropped} of {len(lengths)} prompts have more than {data.max_prompt_tokens} tokens; the longest is "
        f"{place(longest)} with {lengths[longest]}"
    )
    if data.on_too_long == "refuse":
        raise DatasetError(FIELD, f"{problem}; shorten them, raise this, or set on_too_long = 'drop'")
    if not kept:
        raise DatasetError(FIELD, f"{problem}; raise it")
    return kept, f"{problem}. They are left out"
