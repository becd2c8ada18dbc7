"""Several sources in one job: what is refused, and which row of which source each prompt is."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from onbeat.client.datasets import take_local_files
from onbeat.config import JobConfig
from onbeat.config.explain import explain_errors
from onbeat.contracts.answers import ANSWER_RULES
from onbeat.contracts.rewards import recorded_rules
from services.broker.admission.review import review_free_values, reward_uses, sections_of
from services.broker.datasets import DatasetError, DatasetSpec, PromptItem
from services.broker.datasets.child import open_dataset
from services.broker.datasets.sources import Place, name_source, place_of, places_in, read_places
from services.broker.tasks import produce_tasks
from tests.world import job_body

EASY = {"type": "jsonl", "path": "easy.jsonl", "name": "easy", "weight": 3, "order": "in_order"}
HARD = {"type": "jsonl", "path": "hard.jsonl", "name": "hard", "system_prompt": "Think."}
SOURCES = [EASY, HARD]
DATA = {"type": "jsonl", "path": "easy.jsonl"}
FORK = {"job": "parent", "iteration": 2}
TWO = [{"name": "math", "weight": 2.0}, {"name": "exact"}]


def job(data: Any, **sections: Any) -> JobConfig:
    return JobConfig.model_validate(job_body(data=data, **sections))


def refusals(data: Any, **sections: Any) -> list[tuple[str, str]]:
    body = job_body(data=data, **sections)
    with pytest.raises(ValidationError) as refused:
        JobConfig.model_validate(body)
    errors = [{**error, "loc": ("body", *error["loc"])} for error in refused.value.errors()]
    return explain_errors(errors, body)


class InProcess:
    """A data process that reads in this one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, num_rows in (("easy", 10), ("hard", 4)):
            rows = [{"prompt": f"{name} {number}", "answer": str(number)} for number in range(num_rows)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    async def read(self, spec: DatasetSpec, first: int, count: int) -> tuple[list[PromptItem], str]:
        dataset = open_dataset(spec, self._folder)
        return dataset.items(range(first, first + count)), dataset.note


# ---- the configuration -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "field", "sentence"),
    [
        ([EASY, HARD | {"name": "easy"}], "data.name", "two sources are both called easy; give one of them another"),
        ([EASY, HARD | {"name": None}], "data.1.name", "is required for each of several sources; give it a name"),
        ([EASY | {"weight": 0}, HARD | {"weight": 0}], "data.weight", "the weights sum to 0, so that no source has"),
        ([EASY, HARD | {"weight": 0.1234567}], "data.weight", "are allowed; use rounder weights"),
        ([EASY, HARD | {"weight": -1}], "data.1.weight", "greater than or equal to 0, got -1"),
        ([EASY, HARD | {"wieght": 2}], "data.1.wieght", "unknown key; did you mean weight?"),
        ([EASY, HARD | {"signal": "right"}], "data.1.signal", "'right' is no signal; use reward, solved, or part:NAME"),
        ([EASY, HARD | {"signal": "solved"}], "data.1.signal", "solved compares rewards with solved_at, which is not"),
        ([EASY, HARD | {"signal": "part:x"}], "data.1.signal", "part:x is a part of several rewards, and the job has"),
        (
            [EASY, HARD | {"signal": "part:x", "reward": TWO}],
            "data.1.signal",
            "of source hard is called x; use part:NAME",
        ),
        ([EASY, HARD | {"reward": {}}], "data.1.reward.name", "is required"),
        ([EASY, {"name": "hard"}], "data.1", "set data.1.type to one of: hf, jsonl, parquet, reasoning_gym"),
        ([EASY, HARD | {"as_chat": False}], "data.as_chat", "set the same in all"),
        ([], "data", "at least 1 item"),
        (
            EASY,
            "data",
            "name, weight, max_response_tokens, reward, environment, solved_at, signal are keys of several sources",
        ),
        (DATA | {"max_response_tokens": 4}, "data", "are keys of several sources"),
        ([EASY, HARD | {"max_response_tokens": 9}], "data.1.max_response_tokens", "raise that to 9, or lower this"),
    ],
)
def test_sources_that_mean_two_things_are_refused(data, field, sentence):
    ((blamed, message),) = refusals(data)
    assert (blamed, sentence in message) == (field, True), message


def test_kl_in_the_reward_and_signal_of_a_source_are_refused():
    objective = {"type": "grpo", "kl": {"coef": 0.1, "placement": "reward"}}
    ((field, message),) = refusals([EASY, HARD | {"signal": "solved", "solved_at": 1}], objective=objective)
    assert (field, "use objective.kl.placement = 'loss', or signal = 'reward'" in message) == ("data.1.signal", True)
    assert job([EASY, HARD | {"signal": "reward"}], objective=objective)


def test_held_out_data_has_no_weight():
    ((field, message),) = refusals(SOURCES, evaluation={"data": EASY})
    assert (field, "are keys of several training sources; leave them out" in message) == ("evaluation.data", True)


def test_a_single_table_stays_what_it_is():
    config = job({"system_prompt": "Add."})
    assert [field for field, _ in config.sources] == ["data"]
    assert config.sources[0][1] is config.rendering is config.data
    assert DatasetSpec.of_job(config).data == config.data


def test_all_prompts_are_rendered_as_the_first_source_says():
    config = job([EASY | {"template_options": {"x": 1}}, HARD]).dated("2026-01-31T00:00:00Z")
    assert [source.now for _, source in config.sources] == ["2026-01-31T00:00:00Z", None]
    spec = DatasetSpec.of_job(config, 1)
    assert (spec.data.template_options, spec.data.name, spec.data.weight) == ({"x": 1}, None, 1)
    assert JobConfig.model_validate_json(config.model_dump_json()) == config
    other = job([EASY, HARD | {"template_options": {"x": 1}}])
    message = "data.0.template_options is for all prompts of the job; leave this out"
    assert review_free_values(other) == [("data.1.template_options", message)]


def test_files_of_all_sources_are_uploaded(tmp_path):
    for name in ("easy", "hard"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1", "answer": "1"}\n', encoding="utf-8")
    body = job_body(data=[dict(EASY), dict(HARD)])
    assert [file.source.name for file in take_local_files(body, tmp_path)] == ["easy.jsonl", "hard.jsonl"]
    assert body["data"][1]["path"].startswith("datasets/hard-")


def test_every_source_is_looked_at_by_its_field():
    assert [section.field for section in sections_of(job(SOURCES), [])] == ["data.0", "data.1"]


# ---- the prompts -------------------------------------------------------------------------------------------------


def test_rows_of_a_source_come_one_after_another():
    config = job(SOURCES)
    places = [place_of(config, slot) for slot in range(1000)]
    for source, share in enumerate([750, 250]):
        assert [place.index for place in places if place.source == source] == list(range(share))


def test_fork_keeps_the_shares_and_goes_on_in_the_rows():
    parent, fork = job(SOURCES), job(SOURCES, fork=FORK)
    assert [place_of(fork, slot).source for slot in range(8)] == [place_of(parent, slot).source for slot in range(8)]
    assert [place_of(fork, slot) for slot in range(8)] == [place_of(parent, 4 + slot) for slot in range(8)]
    even = job([EASY | {"weight": 1}, HARD], fork={"job": "parent", "iteration": 3})
    counts = Counter[int]()
    for slot in range(1000):
        counts[place_of(even, slot).source] += 1
        assert abs(counts[0] - counts[1]) <= 1
    assert place_of(even, 0) == Place(0, 3)


def test_spare_prompts_are_of_the_sources_of_the_iteration():
    """Five of two slots: both once more, then the first again. Every row of a source belongs to one prompt."""
    config = job(SOURCES, rollout={"max_prompts_per_iteration": 5})
    assert [place.source for place in places_in(config, 1)] == [0, 1, 0, 1, 0]
    places = [place for iteration in range(100) for place in places_in(config, iteration)]
    assert len(set(places)) == len(places)
    assert max(place.index for place in places) < DatasetSpec.of_job(config.extended(100)).num_items


async def test_prompts_name_their_sources_and_rows_stay_apart(tmp_path):
    config, process = job(SOURCES), InProcess(tmp_path)
    tasks = [task for number in range(4) for task in await produce_tasks(config, number, process)]
    assert [task.group_id for task in tasks] == [f"{number}-{index}" for number in range(4) for index in range(2)]
    assert Counter(task.source for task in tasks) == {"easy": 6, "hard": 2}
    easy = [task for task in tasks if task.source == "easy"]
    assert [task.messages[-1].content for task in easy] == [f"easy {number}" for number in range(6)]
    assert [[message.role for message in task.messages] for task in tasks if task.source == "hard"] == [
        ["system", "user"]
    ] * 2
    assert len({task.data_row for task in tasks}) == len(tasks)


async def test_a_source_may_have_shorter_responses(tmp_path):
    config = job([EASY, HARD | {"max_response_tokens": 3}])
    tasks = [task for number in range(2) for task in await produce_tasks(config, number, InProcess(tmp_path))]
    assert {(task.source, task.max_response_tokens) for task in tasks} == {("easy", 8), ("hard", 3)}


async def test_a_source_may_have_its_own_rewards(tmp_path):
    config = job([EASY, HARD | {"reward": TWO}])
    tasks = [task for number in range(2) for task in await produce_tasks(config, number, InProcess(tmp_path))]
    assert {(task.source, task.reward.name, *(reward.part for reward in task.rewards)) for task in tasks} == {
        ("easy", "exact"),
        ("hard", "", "math", "exact"),
    }
    uses = [(use.field, [field for field, _ in use.data]) for use in reward_uses(config)]
    assert uses == [("reward", ["data.0"]), ("data.1.reward.0", ["data.1"]), ("data.1.reward.1", ["data.1"])]
    assert [list(section.rewards) for section in sections_of(config, reward_uses(config))] == [
        ["reward"],
        ["data.1.reward.0", "data.1.reward.1"],
    ]
    assert recorded_rules(config.model_dump(mode="json")) == ANSWER_RULES


async def test_prompts_stay_when_a_job_gets_more_iterations(tmp_path):
    config, process = job(SOURCES), InProcess(tmp_path)
    before, after = await produce_tasks(config, 2, process), await produce_tasks(config.extended(9), 2, process)
    assert before == after


async def test_source_without_weight_has_no_prompts(tmp_path):
    config = job([EASY | {"weight": 0}, HARD])
    places = [place_of(config, slot) for slot in range(20)]
    assert {item.source for item in await read_places(config, places, InProcess(tmp_path))} == {"hard"}


async def test_wrong_row_names_its_source(tmp_path):
    process = InProcess(tmp_path)
    (tmp_path / "hard.jsonl").write_text('{"prompt": "1", "answer": "1"}\n{"prompt": ""}\n', encoding="utf-8")
    with pytest.raises(DatasetError) as refused:
        await read_places(job(SOURCES), [Place(0, 0), Place(1, 0), Place(1, 1)], process)
    assert refused.value.field.startswith("data.1.")
    assert refused.value.message.startswith("source hard: hard.jsonl, line 2 has")


def test_other_fields_name_no_source():
    error = DatasetError("data.10.path", "is not there")
    assert name_source(job(SOURCES), error) is error
