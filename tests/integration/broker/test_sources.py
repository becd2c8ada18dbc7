"""Several sources in one job, over REST and with a real ledger: refusals at submission, and the prompts of each."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from onbeat.contracts.states import IterationState, JobState, Verdict
from onbeat.streams.codec import PromptTask, RolloutGroup
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.signal import Signal
from services.broker.admission import preview
from services.broker.auditor import run_audit
from tests.broker_fixtures import submit
from tests.world import World, job_body, make_group

DATA = {"type": "jsonl", "path": "prompts.jsonl", "name": "say", "weight": 3}
MORE = {"type": "jsonl", "path": "more.jsonl", "name": "more"}


def write_more(folder: Path, num_rows: int = 6, broken_line: int | None = None) -> None:
    rows = [json.dumps({"prompt": f"more {number}", "answer": str(number)}) for number in range(num_rows)]
    if broken_line is not None:
        rows[broken_line - 1] = '{"prompt": "half'
    (folder / "more.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


async def refusals(broker: Any, **sections: Any) -> dict[str, str]:
    answer = await broker.post("/v1/jobs", json=job_body(**sections))
    assert answer.status_code == 422, answer.text
    return {error["field"]: error["message"] for error in answer.json()["errors"]}


async def test_source_that_breaks_at_row_70000_is_refused_by_name(broker, tmp_path):
    write_more(tmp_path, 70_001, broken_line=70_000)
    errors = await refusals(broker, data=[DATA, MORE])
    assert list(errors) == ["data.1.path"]
    assert errors["data.1.path"].startswith("source more: more.jsonl, line 70000 is not valid JSON")


async def test_refusal_of_a_source_names_it(broker, tmp_path):
    write_more(tmp_path)
    assert (
        "source more: there is no file gone.jsonl"
        in (await refusals(broker, data=[DATA, MORE | {"path": "gone.jsonl"}]))["data.1.path"]
    )
    gym = {"type": "reasoning_gym", "task": "chain_sum", "name": "gym"}
    (field, message), *_ = (await refusals(broker, data=[gym, MORE], reward={"name": "reasoning_gym"})).items()
    assert (field, "data.1 has rows" in message) == ("reward.name", True)


async def test_sources_take_turns_and_every_prompt_names_its_own(broker, ledger, world, tmp_path):
    write_more(tmp_path)
    job_id = await submit(broker, data=[DATA | {"order": "in_order"}, MORE | {"order": "in_order", "solved_at": 2}])
    epoch = await world.start_training(job_id)
    seen = []
    for iteration in range(3):
        await world.wait_open(job_id, iteration)
        seen += await world.drain(job_id)
        assert await world.commit(job_id, epoch, iteration)
    assert Counter(task.source for task in seen) == {"say": 5, "more": 1}
    assert {task.messages[-1].content for task in seen} == {*(f"say {number}" for number in range(5)), "more 0"}
    answer = await broker.get(f"/v1/jobs/{job_id}/samples?iteration=1&source=more")
    assert {(sample["group_id"], sample["source"]) for sample in answer.json()["samples"]} == {("1-1", "more")}
    solved = await broker.get(f"/v1/jobs/{job_id}/samples?iteration=1&is_solved=true")
    assert {sample["group_id"] for sample in solved.json()["samples"]} == {"1-0"}  # the other source asks for more
    await ledger.jobs.move(job_id, JobState.SUCCEEDED, epoch=epoch)
    assert (await run_audit(ledger, job_id)).is_clean


async def test_preview_shows_the_sources_in_turn(broker, tmp_path, monkeypatch):
    monkeypatch.setattr(preview.importlib.util, "find_spec", lambda name: None)  # no tokenizer
    write_more(tmp_path)
    body = job_body(data=[DATA | {"weight": 1, "order": "in_order"}, MORE | {"order": "in_order"}])
    answer = await broker.post("/v1/jobs:preview?prompts=4", json=body)
    assert answer.status_code == 200, answer.text
    texts = [prompt["text"] for prompt in answer.json()["prompts"]]
    assert [("say" in text, "more" in text) for text in texts] == [(True, False), (False, True)] * 2


# ---- dynamic sampling --------------------------------------------------------------------------------------------

DYNAMIC = {"num_prompts_per_iteration": 2, "max_prompts_per_iteration": 6}


def make_equal(task: PromptTask) -> RolloutGroup:
    """Make a group that is to be replaced."""
    group = make_group(task)
    for response in group.responses:
        response.reward = 1.0
    return group


async def play(ledger: Ledger, world: World, job_id: str, solved: str) -> list[PromptTask]:
    """Be a rollout until iteration 0 has all of its groups. All responses to prompts of the source `solved` are
    right."""
    seen = []
    while claims := await world.claim_all(job_id, count=1):
        task = claims[0].task
        group = make_equal(task) if task.source == solved else make_group(task)
        assert await ledger.rollout.submit(job_id, claims[0].entry_id, group) is Verdict.ACCEPTED
        seen.append(task)
    return seen


async def start_two(broker: httpx.AsyncClient, world: World, folder: Path) -> tuple[str, str]:
    write_more(folder)
    data = [DATA | {"weight": 1, "order": "in_order"}, MORE | {"order": "in_order"}]
    job_id = await submit(broker, data=data, rollout=DYNAMIC)
    epoch = await world.start_training(job_id)
    await world.wait_open(job_id, 0)
    return job_id, epoch


async def test_groups_of_a_solved_source_are_replaced_from_it_alone(broker, ledger, world, tmp_path):
    job_id, epoch = await start_two(broker, world, tmp_path)
    seen = await play(ledger, world, job_id, solved="more")
    assert [task.group_id for task in seen] == ["0-0", "0-1", "0-2", "0-3"]
    assert [task.messages[-1].content for task in seen] == ["say 0", "more 0", "more 1", "more 2"]
    record = await ledger.iterations.fields(job_id, 0)
    assert (record["state"], record["num_replaced"], record["num_not_replaced"]) == (IterationState.DRAINED, "2", "1")
    assert not await ledger.redis.exists(JobKeys(job_id).spares(0))
    (event,) = [event for event in await ledger.event_log.read(job_id) if event.kind == "iteration.short"]
    assert event.message.startswith("iteration 0 has used all prompts of a source, and is 1 group with signal")
    assert await world.commit(job_id, epoch, 0)
    await world.wait_open(job_id, 1)
    tasks = [claim.task for claim in await world.claim_all(job_id)]
    assert {task.messages[-1].content for task in tasks} == {"say 3", "more 3"}
    assert (await run_audit(ledger, job_id)).violation is None


async def test_audit_sees_a_group_that_another_source_replaced(broker, ledger, world, tmp_path):
    job_id, _ = await start_two(broker, world, tmp_path)
    (claim,) = [claim for claim in await world.claim_all(job_id) if claim.task.source == "more"]
    group = make_equal(claim.task)
    group.source = "say"  # a rollout of somebody else's
    assert await ledger.rollout.submit(job_id, claim.entry_id, group) is Verdict.ACCEPTED
    violation = (await run_audit(ledger, job_id)).violation
    assert violation == "group 0-1 is of source 'say', it was the turn of more"


async def test_audit_sees_an_unsolved_source_that_lost_its_turn(broker, ledger, world, tmp_path, monkeypatch):
    job_id, _ = await start_two(broker, world, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Signal, "is_in", lambda signal, group: True)  # a rollout of somebody else's
        await play(ledger, world, job_id, solved="more")
    violation = (await run_audit(ledger, job_id)).violation
    assert violation == "group 0-1 was not replaced although it has no signal"


async def submit_next(ledger: Ledger, world: World, job_id: str, signal: Signal) -> str:
    """Be a rollout that gets one more prompt, and gives it responses with different rewards. Return its source."""
    (claim,) = await world.claim_all(job_id, count=1)
    assert await ledger.rollout.submit(job_id, claim.entry_id, make_group(claim.task), signal) is Verdict.ACCEPTED
    return claim.task.source


async def start_with_signals(broker: httpx.AsyncClient, world: World, folder: Path) -> tuple[str, Signal]:
    """Start a job of which only one source compares rewards: responses to `more` are never solved."""
    write_more(folder)
    more = MORE | {"shuffle": False, "signal": "solved", "solved_at": 100}
    job_id = await submit(broker, data=[DATA | {"weight": 1, "shuffle": False}, more], rollout=DYNAMIC)
    await world.start_training(job_id)
    await world.wait_open(job_id, 0)
    config = (await broker.get(f"/v1/jobs/{job_id}")).json()["config"]
    return job_id, Signal.of_record(config)


async def test_groups_are_replaced_by_the_signal_of_their_source(broker, ledger, world, tmp_path):
    job_id, signal = await start_with_signals(broker, world, tmp_path)
    sources = [await submit_next(ledger, world, job_id, signal) for _ in range(4)]
    assert Counter(sources) == {"say": 1, "more": 3}
    record = await ledger.iterations.fields(job_id, 0)
    assert (record["state"], record["num_replaced"], record["num_not_replaced"]) == (IterationState.DRAINED, "2", "1")
    assert (await run_audit(ledger, job_id)).violation is None


async def test_audit_judges_a_group_by_the_signal_of_its_source(broker, ledger, world, tmp_path):
    job_id, _ = await start_with_signals(broker, world, tmp_path)
    for _ in range(2):
        await submit_next(ledger, world, job_id, Signal())  # a rollout of somebody else's
    violation = (await run_audit(ledger, job_id)).violation
    assert violation == "group 0-1 was not replaced although it has no signal"


async def test_audit_names_the_signal_of_a_replaced_group(broker, ledger, world, tmp_path):
    job_id, signal = await start_with_signals(broker, world, tmp_path)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Signal, "is_in", lambda signal, group: False)  # a rollout of somebody else's
        await submit_next(ledger, world, job_id, signal)
    assert (await run_audit(ledger, job_id)).violation == "group 0-0 was replaced although its rewards differ"
