"""Refusals before a job is created: rewards, trackers and models that cannot work."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.config.explain import describe_wrong_job
from onbeat.contracts.records import TrainerRecord
from onbeat.contracts.rewards import RewardConfig
from onbeat.streams.ledger import Ledger
from services.broker.admission.models import review_model
from services.broker.admission.review import MAX_TRIALS
from services.broker.admission.rewards import review_on_data
from services.broker.datasets import PromptItem
from services.broker.settings import READ_ONLY
from tests.broker_fixtures import running_broker
from tests.installed import install
from tests.world import job_body

MOST, UPDATES = "max_prompts_per_iteration", "num_updates_per_iteration"
SOLUTION = "Tom has 3 + 4 = 7 apples.\n#### 7"


async def refusals(broker: httpx.AsyncClient, **sections: Any) -> list[dict[str, str]]:
    answer = await broker.post("/v1/jobs", json=job_body(**sections))
    assert answer.status_code in (201, 422), answer.text
    return list(answer.json()["errors"]) if answer.status_code == 422 else []


async def beat_trainer(ledger: Ledger, pool: str, trainer: str, trackers: list[str]) -> None:
    record = TrainerRecord(id=trainer, state="idle", trackers=trackers)
    await ledger.trainers.heartbeat(pool, record)


# ---- one thing each ---------------------------------------------------------------------------------------------

DATA = {"type": "jsonl", "path": "prompts.jsonl"}


@pytest.mark.parametrize(
    ("sections", "field", "message"),
    [
        ({"rolout": {}}, "rolout", "did you mean rollout?"),
        (
            {"rollout": {"num_prompts_per_iteration": 10000, "num_samples_per_prompt": 1024}},
            "rollout.num_prompts_per_iteration",
            "10240000 responses in one iteration",
        ),
        ({"rollout": {"max_response_tokens": 8192}}, "rollout.max_response_tokens", "context of 8192 tokens; lower it"),
        ({"model": {"max_context_tokens": 9000}}, "model.max_context_tokens", "the model supports 8192"),
        ({"model": {"path": "bundled:gpt"}}, "model.path", "bundled:smollm2-135m-instruct"),
        ({"model": {"path": "/no/such/model"}}, "model.path", "is no folder"),
        ({"model": {"adapter": "/no/such"}, "lora": {}}, "model.adapter", "/no/such cannot be read ("),
        ({"model": {"path": "org/na me"}}, "model.path", "no hub id"),
        ({"model": {"path": "/a\x00b"}}, "model.path", "is no folder"),
        ({"reward": {"name": "exactt"}}, "reward.name", "did you mean exact?"),
        ({"reward": {"name": "reasoning_gym"}}, "reward.name", "use exact, regex or math"),
        ({"data": {"answer_field": None}}, "data.answer_field", "name the field that holds it"),
        (
            {"reward": {"name": "regex", "options": {"pattern": "("}}},
            "reward.options.pattern",
            "is no regular expression",
        ),
        ({"tracking": [{"type": "wand"}]}, "tracking.0", "set tracking.0.type to one of: mlflow, trackio"),
        ({"reward": {"name": "exact", "options": {"flags": "i"}}}, "reward.options", "it has: ignore_case"),
        ({"reward": [{"name": "exact"}, {"name": "regex"}]}, "reward.1.options.pattern", "needs a regular expression"),
        ({"data": {"path": "gone.jsonl"}}, "data.path", "upload it with `onbeat data push`"),
        ({"evaluation": {"data": DATA | {"answer_field": None}}}, "evaluation.data.answer_field", "name the field"),
        (
            {"evaluation": {"sets": [{"name": "a", "data": DATA}, {"name": "b", "data": DATA | {"path": "b.jsonl"}}]}},
            "evaluation.sets.1.data.path",
            "upload it with `onbeat data push`",
        ),
        (
            {"evaluation": {"sets": [{"name": "a", "data": DATA, "reward": {"name": "regx"}}]}},
            "evaluation.sets.0.reward.name",
            "regex",
        ),
        ({"rollout": {MOST: 2}}, f"rollout.{MOST}", "use more, 6 say"),
        ({"rollout": {"num_prompts_per_iteration": 5_000, MOST: 5_000}}, f"rollout.{MOST}", "use more, 10000 say"),
        ({"rollout": {"num_prompts_per_iteration": 10_000, MOST: 10_000}}, f"rollout.{MOST}", "lower rollout.num_"),
        ({"rollout": {MOST: 10_000, "num_samples_per_prompt": 1024}}, f"rollout.{MOST}", "10240000 responses in one"),
        ({"rollout": {MOST: 4}, "schedule": {"mode": "bounded"}}, f"rollout.{MOST}", "use schedule.mode = 'periodic'"),
        ({"rollout": {MOST: 4}, "training": {UPDATES: 2}}, f"training.{UPDATES}", "use 1, or leave out rollout.max"),
        ({"tracking": [{"type": "?"}] * 60_000}, "tracking", "should have at most 3 items"),
        ({"reward": [{"name": 0}] * 60_000}, "reward", "should have at most 8 items"),
        ({"schedule": {"earlier_ends": [0] * 300_000}}, "schedule.earlier_ends", "should have at most 10000 items"),
        (
            {"evaluation": {"data": DATA, "num_prompts": 10_000, "num_samples_per_prompt": 1024}},
            "evaluation.num_samples_per_prompt",
            "10240000 responses in one evaluation",
        ),
        ({"lora": {"target_modules": []}}, "lora.target_modules", "names no layer"),
        ({"lora": {"rank": 2**31}}, "lora.rank", "less than or equal to 65536"),
        ({"data": {"on_too_long": "refuse"}}, "data.on_too_long", "refuse needs max_prompt_tokens"),
    ],
)
async def test_impossible_job_is_refused_with_field_and_remedy(broker, ledger, sections, field, message):
    before = await ledger.jobs.ids()
    refused = {error["field"]: error["message"] for error in await refusals(broker, **sections)}
    assert message in refused[field]
    assert await ledger.jobs.ids() == before


# ---- all at once -------------------------------------------------------------------------------------------------


async def test_schema_and_other_checks_refuse_together(broker, ledger):
    await beat_trainer(ledger, "crowded", "t1", ["wandb"])
    wrong = {
        "pool": "crowded",
        "seed": "x",
        "rollout": {"num_samples_per_prompt": 0},
        "schedule": {"num_iterations": None, "num_iteration": 3},
        "model": {"path": "bundled:nothing", "dtype": "fp16"},
        "data": {"path": "missing.jsonl"},
        "reward": {"name": "exactly"},
        "tracking": [{"type": "mlflow"}],
    }
    first = {f"schedule.{name}" for name in ("num_iterations", "num_iteration")}
    first |= {"seed", "rollout.num_samples_per_prompt", "model.dtype"}
    later = {"model.path", "data.path", "reward.name", "tracking.0.type"}
    assert {error["field"] for error in await refusals(broker, **wrong)} == first | later
    valid = {"rollout": {}, "schedule": {}, "model": {"path": "bundled:nothing"}, "seed": 1}
    assert {error["field"] for error in await refusals(broker, **(wrong | valid))} == later


async def test_what_does_not_hold_between_sections_is_said_together(broker):
    wrong = {
        "rollout": {"num_samples_per_prompt": 1, "num_prompts_per_iteration": 2},
        "training": {"num_updates_per_iteration": 3},
        "objective": {"type": "grpo", "old_policy": "proximal"},
    }
    fields = ["rollout.num_samples_per_prompt", "training.num_updates_per_iteration", "objective.old_policy"]
    assert [error["field"] for error in await refusals(broker, **wrong)] == fields
    job = job_body(**wrong)
    with pytest.raises(ValidationError) as refused:
        JobConfig.model_validate(job)
    lines = describe_wrong_job(refused.value, job, "job.toml").splitlines()
    assert [line.split(": ")[0].strip() for line in lines[1:]] == fields


async def test_body_with_many_wrong_sections_is_refused(broker):
    model = {f"unknown_{i}": i for i in range(30)}  # more than are explained
    refused = await broker.post("/v1/jobs", json=job_body(model=model, rollout="x", schedule=["y"]))
    assert refused.status_code == 422, refused.text


async def test_misspelt_key_hides_what_it_may_have_meant(broker):
    errors = await refusals(broker, data={"answr_field": "level", "answer_field": "x"}, reward={"name": "exactly"})
    assert {error["field"] for error in errors} == {"data.answr_field", "reward.name"}
    options = {"name": "regex", "options": "x"}  # nobody knows whether a pattern is missing
    assert [error["field"] for error in await refusals(broker, reward=options)] == ["reward.options"]


# ---- rewards -----------------------------------------------------------------------------------------------------


@pytest.fixture
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with rewards of a user, visible to this process and to those that it starts."""
    site = tmp_path / "site"
    code = (
        "def short(response, context, *, limit):\n    return float(len(response) < limit)\n"
        "def strict(response, context):\n    return float(response.split('=')[1])\n"
        "def unnamed(response, context):\n    return {'score': 1.0}\n"
    )
    entries = (
        "[onbeat.rewards]\nshort = own_rewards:short\nstrict = own_rewards:strict\nunnamed = own_rewards:unnamed\n"
    )
    install(site, "own", entries, own_rewards=code)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))


@pytest.mark.usefixtures("own_rewards")
async def test_options_that_a_reward_does_not_take_are_refused(broker):
    (error,) = await refusals(broker, reward={"name": "short", "options": {"limit2": 3}})
    assert error["field"] == "reward.options"
    assert "missing a required" in error["message"] or "unexpected keyword argument 'limit2'" in error["message"]
    assert await refusals(broker, reward={"name": "short", "options": {"limit": 3}}) == []


@pytest.mark.usefixtures("own_rewards")
@pytest.mark.parametrize("name", ["strict", "unnamed"])
async def test_own_reward_that_fails_on_the_answer_is_a_warning(broker, name):
    created = await broker.post("/v1/jobs", json=job_body(reward={"name": name}))
    assert created.status_code == 201, created.text
    events = (await broker.get(f"/v1/jobs/{created.json()['id']}/events")).json()["events"]
    (warning,) = [event["message"] for event in events if event["kind"] == "job.warning"]
    assert f"reward {name} fails on the first prompt's own answer" in warning


@pytest.mark.parametrize(
    "reward", [{"name": "math"}, {"name": "exact"}, {"name": "regex", "options": {"pattern": "(x)"}}]
)
async def test_answer_inside_its_field_is_refused_with_the_pattern(broker, tmp_path, reward):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "How many?", "answer": SOLUTION}) + "\n")
    (error,) = await refusals(broker, reward=reward)
    assert error["field"] == "data.answer_pattern"
    assert "set it to '#### (.+)'" in error["message"]
    assert await refusals(broker, reward=reward, data={"answer_pattern": "#### (.+)"}) == []


@pytest.mark.parametrize(
    ("answer", "kind"),
    [(["Paris", "paris"], "a list"), ({"text": ["Paris"]}, "a mapping"), (True, "neither text nor a number")],
)
async def test_answer_that_is_no_text_is_refused(broker, tmp_path, answer, kind):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "The capital?", "answer": answer}) + "\n")
    for name in ("exact", "math"):
        (error,) = await refusals(broker, reward={"name": name})
        assert error["field"] == "data.answer_field"
        where = "prompts.jsonl, line 1 has the answer"
        assert error["message"].startswith(f"{where} {json.dumps(answer)}, which is {kind}")
        assert f"reward {name} compares text; name a field" in error["message"]


async def test_own_answer_with_reward_0_is_a_note(broker):
    for pattern, notes in (
        (r"(\d+)", []),
        ("<answer>(.*)</answer>", ["reward regex gives the first prompt's own answer '"]),
    ):
        reward = {"name": "regex", "options": {"pattern": pattern}}
        answer = await broker.post("/v1/jobs:validate", json=job_body(reward=reward))
        assert [note[: len(start)] for note, start in zip(answer.json()["notes"], notes, strict=True)] == notes


async def test_held_out_answers_are_looked_at_as_well(broker, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "say 1", "answer": "1"}\n{"prompt": "?", "answer": [1]}\n')
    evaluation = {"data": DATA | {"path": "held_out.jsonl"}, "num_prompts": 2}
    (error,) = await refusals(broker, evaluation=evaluation)
    assert error["field"] == "evaluation.data.answer_field"
    assert "held_out.jsonl, line 2 has the answer [1]" in error["message"]
    body = job_body(evaluation=evaluation | {"num_prompts": 1})
    (note,) = (await broker.post("/v1/jobs:validate", json=body)).json()["notes"]
    assert note.startswith("1 of the 1 held-out prompts of evaluation.data are in the training data, too")


@pytest.mark.parametrize(("pattern", "needs_answer"), [(r"\(?x", False), ("(?:x|y)", False), ("(x|y)", True)])
async def test_regex_needs_answers_only_if_its_pattern_has_a_group(broker, tmp_path, pattern, needs_answer):
    reward = {"name": "regex", "options": {"pattern": pattern}}
    fields = {error["field"] for error in await refusals(broker, reward=reward, data={"answer_field": None})}
    assert fields == ({"data.answer_field"} if needs_answer else set())
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "How many?", "answer": SOLUTION}) + "\n")
    fields = {error["field"] for error in await refusals(broker, reward=reward)}
    assert fields == ({"data.answer_pattern"} if needs_answer else set())


async def test_many_requests_do_not_start_many_processes(broker, monkeypatch):
    num_now, most = 0, 0

    async def score_own_answer(*_):
        nonlocal num_now, most
        num_now += 1
        most = max(most, num_now)
        await asyncio.sleep(0.4)  # much longer than reading the first row
        num_now -= 1

    monkeypatch.setattr("services.broker.admission.rewards.score_own_answer", score_own_answer)
    body = job_body(reward={"name": "math"})
    answers = await asyncio.gather(*(broker.post("/v1/jobs:validate", json=body) for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert most == MAX_TRIALS


async def test_slow_data_of_one_job_holds_up_no_other_job(broker, tmp_path):
    (tmp_path / "slow.jsonl").write_text(json.dumps({"prompt": "?", "answer": "a" * 60}) + "\n")
    endless = job_body(data={"path": "slow.jsonl", "answer_pattern": "(a|aa)+b"})
    slow = asyncio.create_task(broker.post("/v1/jobs:validate", json=endless))
    await asyncio.sleep(0.5)
    assert await refusals(broker) == []
    assert not slow.done()
    slow.cancel()


@pytest.mark.parametrize(
    "slow",
    [
        {"data": {"path": "slow.jsonl", "answer_pattern": "(a|aa)+b"}},
        {"reward": {"name": "regex", "options": {"pattern": "(?i)" + "[\\x00-\\U0010ffff]" * 2000}}},
        {"reward": {"name": "math"}},
    ],
    ids=["data", "pattern", "trial"],
)
async def test_job_that_gets_no_place_in_time_may_come_again(broker, tmp_path, monkeypatch, slow):
    monkeypatch.setattr("services.broker.admission.rewards.score_own_answer", lambda *_: asyncio.sleep(60))
    (tmp_path / "slow.jsonl").write_text(json.dumps({"prompt": "?", "answer": "a" * 60}) + "\n")
    monkeypatch.setattr("services.broker.datasets.process.PLACE_S", 0.3)
    jobs = [asyncio.create_task(broker.post("/v1/jobs:validate", json=job_body(**slow))) for _ in range(MAX_TRIALS + 1)]
    answered, others = await asyncio.wait(jobs, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    answer = answered.pop().result()  # a place is held for longer than the last one waits
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "5")
    assert "busy for 0.3 s with checks of other jobs" in answer.json()["detail"]
    (error,) = await refusals(broker, **slow, seed="x")  # the seed is wrong in any case
    assert error["field"] == "seed"
    for other in others:
        other.cancel()


async def test_answer_that_is_no_mathematics_is_refused():
    reward = RewardConfig(name="math")
    for answer, is_right in (("1/2", True), ("", False)):
        complaints, notes = await review_on_data("reward", reward, PromptItem(text="?", context={"answer": answer}))
        assert (complaints == [], notes) == (is_right, [])


# ---- trackers ----------------------------------------------------------------------------------------------------


async def test_tracker_that_no_trainer_has_is_refused(broker, ledger):
    wanted = {"pool": "tracked", "tracking": [{"type": "mlflow"}]}
    assert await refusals(broker, **wanted) == []  # no trainer, so nothing is known
    await beat_trainer(ledger, "tracked", "t1", ["wandb"])
    (error,) = await refusals(broker, **wanted)
    assert error["field"] == "tracking.0.type"
    assert "mlflow is not installed where the trainers of pool tracked run" in error["message"]
    await beat_trainer(ledger, "tracked", "t2", ["mlflow"])
    assert await refusals(broker, **wanted) == []


# ---- models of a hub ---------------------------------------------------------------------------------------------


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    return tmp_path / "hub"


def refusal_of_model(path: str) -> str:
    """Return what is wrong with a model, where the trainers share this machine; '' if nothing is."""
    config = JobConfig.model_validate(job_body(model={"path": path}))
    ((field, message),) = review_model(config, has_model_folders=True) or [("model.path", "")]
    assert field == "model.path"
    return message


def test_model_of_a_hub_that_cannot_be_had_is_refused(empty_cache, monkeypatch):
    assert "the hub http://127.0.0.1:1 does not answer" in refusal_of_model("org/name")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refusal_of_model("org/name")
    snapshot = empty_cache / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert refusal_of_model("org/name") == refusal_of_model("bundled:smollm2-135m-instruct") == ""


@pytest.mark.usefixtures("empty_cache")
async def test_model_that_a_hub_does_not_have_is_refused(monkeypatch, tmp_path):
    (tmp_path / "token").write_text("of-a-login\n")

    async def serve(reader, writer):
        asked = await reader.readuntil(b"\r\n\r\n")
        is_there = b"/api/models/org/there " in asked and b"Bearer of-a-login\r\n" in asked
        status = b"200 OK" if is_there else b"404 Not Found"
        writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        assert await asyncio.to_thread(refusal_of_model, "org/there") == ""
        assert "has no model org/gone" in await asyncio.to_thread(refusal_of_model, "org/gone")


# ---- a broker that only shows ------------------------------------------------------------------------------------


async def test_broker_that_only_shows_changes_nothing(ledger, tmp_path):
    async with running_broker(ledger, tmp_path, is_read_only=True) as broker:
        for method, path in (("POST", "/v1/jobs"), ("PUT", "/v1/datasets/a.jsonl"), ("DELETE", "/v1/jobs/job-1")):
            refused = await broker.request(method, path, json=job_body())
            assert (refused.status_code, "`onbeat chat JOB` works" in refused.json()["detail"]) == (403, True)
        assert (await broker.get("/readyz")).status_code == 200
        assert (await broker.get("/v1/jobs")).status_code == 200
        findings = (await broker.get("/v1/doctor")).json()["findings"]
        assert READ_ONLY in [finding["sentence"] for finding in findings]
        assert not [task for task in asyncio.all_tasks() if task.get_name() in ("conductor", "retention", "silence")]


async def test_template_without_the_system_prompt_is_refused(broker, tmp_path):
    from tests.tiny_models import write_tied_model

    folder = write_tied_model(tmp_path / "model")
    body = job_body(model={"path": str(folder)}, data=job_body()["data"] | {"system_prompt": "Be brief."})
    assert (await broker.post("/v1/jobs:validate", json=body)).status_code == 200
    users_only = "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(users_only)
    answer = await broker.post("/v1/jobs:validate", json=body)
    (error,) = answer.json()["errors"]
    assert (answer.status_code, error["field"]) == (422, "model.path")
    assert "does not show the message of the role system" in error["message"]
