"""Prompts and rows of the next iteration are read while the one before is trained, and a second time if that failed."""

import asyncio
from typing import Any

import pytest

from onbeat.config import JobConfig
from services.broker.datasets import ChatMessage, DatasetError, PromptItem
from services.broker.prompts import JobPrompts
from tests.world import job_body

DATA = {"type": "jsonl", "path": "examples.jsonl"}
START = {
    "data": DATA,
    "num_rows_per_iteration": 3,
    "num_iterations": 2,
    "held_out": {"data": DATA | {"path": "held_out.jsonl"}, "num_rows": 1},
}


class Reader:
    """A data process that fails so many times at first, and remembers what was read."""

    def __init__(self, num_failures: int = 0) -> None:
        self.num_failures, self.reads = num_failures, []

    async def read(self, spec: Any, first: int, count: int) -> tuple[list[PromptItem], str]:
        self.reads.append((spec.data.path, first))
        if self.num_failures:
            self.num_failures -= 1
            raise DatasetError("data.path", "is away")
        messages = [ChatMessage(role="user", content="2+2?")]
        return [PromptItem(messages=messages, context={"answer": None}, row=first)] * count, ""


def prompts_of(reader: Any, ledger: Any = None) -> tuple[JobPrompts, JobConfig]:
    return JobPrompts(ledger, reader, "job-1"), JobConfig.model_validate(job_body(warm_start=START))


async def test_rows_are_read_before_they_are_taken():
    reader = Reader()
    prompts, config = prompts_of(reader)
    prompts.prepare(config, 1)
    await asyncio.sleep(0)
    assert reader.reads == [("examples.jsonl", 3), ("prompts.jsonl", 4)]  # and the first prompts behind the rows
    contents = await prompts.take(config, 1)
    assert len(reader.reads) == 2
    assert (len(contents.rows), contents.tasks, contents.held_out) == (3, (), [])


async def test_the_first_rows_come_with_the_held_out_ones():
    prompts, config = prompts_of(Reader())
    assert [len((await prompts.take(config, 0)).held_out) for _ in range(2)] == [1, 1]


async def test_prompts_follow_the_rows():
    prompts, config = prompts_of(reader := Reader())
    contents = await prompts.take(config, 2)
    assert reader.reads == [("prompts.jsonl", 4)]
    assert ([task.group_id for task in contents.tasks], contents.rows) == (["2-0", "2-1"], ())


@pytest.mark.parametrize(("iteration", "field"), [(1, "warm_start.data.path"), (2, "data.path")])
async def test_reading_that_failed_ahead_is_tried_again(iteration, field):
    prompts, config = prompts_of(Reader(num_failures=1))
    contents = await prompts.take(config, iteration)
    assert contents.rows or contents.tasks
    prompts, config = prompts_of(Reader(num_failures=9))
    with pytest.raises(DatasetError) as refused:
        await prompts.take(config, iteration)
    assert refused.value.field == field
