"""The first prompts of a job over REST, as its model gets them, with its rewards tried on them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from onbeat.cli.plan import GB, plan_memory
from onbeat.config import JobConfig
from onbeat.contracts.memory_plan import MAX_NUM_SEQS, planned_dtype
from onbeat.machine.processor import read_processor
from services.broker.admission import preview
from services.broker.admission.memory import BY_MEMORY, NO_TORCH, describe_memory
from tests.installed import install
from tests.tiny_models import write_tied_model
from tests.world import job_body

ROWS = [{"prompt": "2 + 2?", "answer": "4"}, {"prompt": "3 + 4?", "answer": "7"}]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return str(write_tied_model(tmp_path / "model"))


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview.importlib.util, "find_spec", lambda name: None)


async def ask(broker: httpx.AsyncClient, model: str, count: int = 2, status: int = 200, **sections: Any) -> Any:
    data = {"path": "rows.jsonl", "order": "in_order"} | sections.pop("data", {})
    job = job_body(model={"path": model}, data=data, **sections)
    answer = await broker.post("/v1/jobs:preview", params={"prompts": count}, json=job)
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_prompts_are_those_of_the_model_with_both_rewards(broker, model, tmp_path, monkeypatch):
    code = "def score(response, context):\n    return {'reward': len(response), 'words': 1.0}\n"
    site = install(tmp_path / "site", "lengths", "[onbeat.rewards]\nlength = lengths:score\n", lengths=code)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    jobs_before = (await broker.get("/v1/jobs")).json()
    answer = await ask(broker, model, reward=[{"name": "exact"}, {"name": "length", "weight": 0.5}])
    first, second = answer["prompts"]
    assert len(answer["prompts"]) == 2
    assert [note for note in answer["notes"] if not note.startswith("memory at the peak")] == []
    assert "2 + 2?" in first["text"]
    assert first["text"] != "2 + 2?"  # the template is around it
    assert first["num_tokens"] > 6
    shown = [(trial["response"], trial["text"], trial["reward_name"], trial["reward"]) for trial in second["trials"]]
    assert shown == [
        ("own answer", "7", "exact", 1.0),
        ("empty", "", "exact", 0.0),
        ("own answer", "7", "length", 1.0),
        ("empty", "", "length", 0.0),
    ]
    assert second["trials"][2]["parts"] == {"words": 1.0}
    assert (await broker.get("/v1/jobs")).json() == jobs_before


async def test_prompt_of_the_teacher_is_shown_beside_the_policys(broker, model, tmp_path):
    rows = [{"prompt": "2 + 2?", "hint": "2 + 2? It is 4.", "answer": "4"}]
    (tmp_path / "hints.jsonl").write_text(json.dumps(rows[0]) + "\n", encoding="utf-8")
    data, teacher = {"path": "hints.jsonl", "system_prompt": "short"}, {"path": model, "prompt_field": "hint"}
    (prompt,) = (await ask(broker, model, 1, data=data, teacher=teacher))["prompts"]
    assert "2 + 2?" in prompt["text"]
    assert "It is 4." not in prompt["text"]
    assert prompt["teacher_text"] == prompt["text"].replace("2 + 2?", "2 + 2? It is 4.")
    (prompt,) = (await ask(broker, model, 1, data=data))["prompts"]
    assert prompt["teacher_text"] is None


async def test_rows_that_cannot_be_read_are_refused_by_field(broker, model, no_transformers):
    answer = await ask(broker, model, status=422, data={"prompt_field": "question"})
    assert [error["field"] for error in answer["errors"]] == ["data.prompt_field"]
    answer = await ask(broker, model, status=422, optimizer={"learning_rate": -1})
    assert [error["field"] for error in answer["errors"]] == ["optimizer.learning_rate"]


async def test_rewards_of_environments_are_not_tried(broker, model, no_transformers):
    rows = {"type": "jsonl", "path": "rows.jsonl", "order": "in_order"}
    sources = [rows | {"name": "sums"}, rows | {"name": "games", "environment": {"name": "guess_number"}}]
    job = job_body(model={"path": model}, data=sources)
    answer = (await broker.post("/v1/jobs:preview", params={"prompts": 2}, json=job)).json()
    assert [len(prompt["trials"]) for prompt in answer["prompts"]] == [2, 0]
    note = "rewards are not tried for source games: they come from an environment, which plays whole episodes"
    assert note in answer["notes"]


async def test_failing_reward_says_why_on_each_response(broker, model, no_transformers):
    answer = await ask(broker, model, 1, reward={"name": "exact", "options": {"no_such": 1}})
    (prompt,) = answer["prompts"]
    assert [trial["reward"] for trial in prompt["trials"]] == [None, None]
    assert all("no_such" in trial["message"] for trial in prompt["trials"])


async def test_group_reward_compares_both_responses_to_a_prompt(broker, model, tmp_path, monkeypatch, no_transformers):
    code = "def rank(responses, context):\n    return [len(responses) + len(text) for text in responses]\n"
    site = install(tmp_path / "site", "ranks", "[onbeat.rewards]\nrank = ranks:rank\n", ranks=code)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    (prompt,) = (await ask(broker, model, 1, reward={"name": "rank"}))["prompts"]
    assert [(trial["response"], trial["reward"]) for trial in prompt["trials"]] == [("own answer", 3.0), ("empty", 2.0)]


async def test_prompts_without_transformers_are_those_of_the_rows(broker, model, no_transformers):
    answer = await ask(broker, model, 1, reward={"name": "http", "options": {"service": "judge"}})
    assert answer["prompts"] == [{"text": "user: 2 + 2?", "num_tokens": None, "trials": [], "teacher_text": None}]
    assert [note.partition(":")[0] for note in answer["notes"]] == [
        "the prompts are shown without the model's template",
        "rewards http and judge are not tried",
        NO_TORCH.partition(":")[0],
    ]


async def test_memory_is_what_the_command_predicts(broker, model):
    answer = await ask(broker, model, 1)
    job = JobConfig.model_validate(job_body(model={"path": model}))
    job = job.with_dtype(planned_dtype("auto", read_processor().bfloat16 == "native"))
    plan = await asyncio.to_thread(plan_memory, job, answer["prompts"][0]["num_tokens"], 1, False, MAX_NUM_SEQS)
    assert list(plan) == ["trainer", "rollout", "engine core"]
    words = ", ".join(f"{name} {sum(parts.values()) / GB:.1f} GB" for name, parts in plan.items())
    assert answer["notes"][-1].startswith(f"memory at the peak on a CPU, if all responses reach their limit: {words} (")


async def test_memory_of_rows_by_memory_depends_on_the_trainer(broker, model):
    answer = await ask(broker, model, 1, training={"max_tokens_per_micro_batch": "auto"})
    assert answer["notes"][-1] == BY_MEMORY


async def test_memory_that_cannot_be_planned_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr("services.broker.admission.memory.PLAN_S", 0.01)
    config = JobConfig.model_validate(job_body())
    assert "the plan took longer than 0.01 s" in await describe_memory(config, None)
    monkeypatch.setattr("services.broker.admission.memory.PLAN_S", 60.0)
    config = JobConfig.model_validate(job_body(model={"path": str(tmp_path)}))
    assert (await describe_memory(config, None)).startswith("memory is not predicted: ")


async def test_names_to_choose_from_are_those_installed(broker):
    answer = await broker.get("/v1/installed")
    names = answer.json()
    assert answer.status_code == 200, answer.text
    assert {"exact", "http", "math", "regex"} <= set(names["rewards"])
    assert "chain_sum" in names["tasks"]
    assert names["environments"] == sorted(names["environments"])
