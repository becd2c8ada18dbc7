"""Snippets: Python runs against a live stack, TOML is a job or a part of one, JSON is what it seems."""

import ast
import asyncio
import inspect
import json
import tomllib
from typing import Any

import pytest

from onbeat.client import Client
from onbeat.config import JobConfig
from onbeat.contracts.states import JobState
from tests.docs.conftest import Workplace
from tests.docs.exceptions import NOT_A_JOB
from tests.docs.pages import ROOT, Block, all_blocks, blocks_of, page_names
from tests.docs.test_live_commands import write_shown_files

pytestmark = pytest.mark.slow

QUICKSTART = tomllib.loads((ROOT / "examples/quickstart.toml").read_text())
KINDS = ("type", "mode", "name", "path")  # a fragment with another kind of a section replaces it


# ---- Python ------------------------------------------------------------------------------------------------------


def pages_with_python() -> list[str]:
    return [page for page in page_names() if any(block.language == "python" for block in blocks_of(page))]


@pytest.mark.parametrize("page", pages_with_python())
def test_python_of_a_page_runs(workplace, in_page_folder, page):
    """The snippets run in order, in one namespace: `job_id` is a finished job, `client` is a client of its broker."""

    def run_snippet(block: Block, workplace: Workplace, namespace: dict[str, Any]) -> None:
        """Run a snippet, in which `await` may stand outside of functions, as in a notebook."""
        text = workplace.shortened(block.text)
        code = compile(text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, namespace))  # noqa: S307
        else:
            exec(code, namespace)

    need_a_running_job = {"docs/chat.md"}
    folder = in_page_folder(page)
    write_shown_files(workplace, page, folder)
    job_id = workplace.job_in(JobState.RUNNING) if page in need_a_running_job else workplace.finished
    try:
        with Client(workplace.stack.url) as client:
            namespace: dict[str, Any] = {"__name__": "snippet", "job_id": job_id, "client": client}
            for block in blocks_of(page):
                if block.language == "python":
                    run_snippet(block, workplace, namespace)
    finally:
        workplace.end(job_id)


# ---- jobs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block",
    [block for block in all_blocks("toml") if (block.page, block.text.splitlines()[0]) not in NOT_A_JOB],
    ids=str,
)
def test_toml_is_a_job_or_a_part_of_one(block):
    given = tomllib.loads(block.text)
    job = given if {"model", "data", "reward", "rollout", "schedule"} <= given.keys() else quickstart_with(given)
    JobConfig.model_validate(job)


def quickstart_with(given: dict[str, Any]) -> dict[str, Any]:
    """Return the quick start with these keys. A section of another kind is replaced, except counts of a schedule."""
    is_sft = given.get("objective", {}).get("type") == "sft"  # it refuses keys of RL
    left_out = {"data", "optimizer"} if is_sft else {"reward"} if "environment" in given else set()
    merged = {name: value for name, value in QUICKSTART.items() if name not in left_out}
    for name, value in given.items():
        old = QUICKSTART.get(name)
        if not isinstance(value, dict) or not isinstance(old, dict):
            merged[name] = value
            continue
        is_other = name != "schedule" and any(kind in value and value[kind] != old.get(kind) for kind in KINDS)
        is_other |= name == "evaluation"  # another section has sets where the quick start has data
        merged[name] = value if is_other else old | value
    return merged


@pytest.mark.parametrize("block", all_blocks("json"), ids=str)
def test_json_is_json(block):
    document = json.loads(block.text)
    if isinstance(document, dict) and {"model", "rollout"} & document.keys():
        JobConfig.model_validate(quickstart_with(document))


def test_every_documented_data_section_can_be_read(workplace, in_page_folder):
    """The files are those that the page's own Python makes."""
    from services.broker.datasets import DatasetSpec
    from services.broker.datasets.child import open_dataset

    folder = in_page_folder("docs/data.md")
    namespace: dict[str, Any] = {}
    for block in blocks_of("docs/data.md"):
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), namespace)
    sections = [tomllib.loads(block.text) for block in blocks_of("docs/data.md") if block.language == "toml"]
    types = set()
    for section in sections:
        for _, data in JobConfig.model_validate(quickstart_with({"data": section["data"]})).sources:
            types.add(data.type)
            if data.type == "hf":  # a hub is not always there
                continue
            item = open_dataset(DatasetSpec(data=data, seed=0, num_items=4), folder).item(0)
            assert item.messages
            assert item.context["question"]
    assert types == {"hf", "jsonl", "parquet", "reasoning_gym"}
