"""What a policy says, over REST on a whole broker: samples by reward, groups token by token, prompts that repeat."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from onbeat.client import AsyncClient
from onbeat.contracts.errors import ApiError
from onbeat.contracts.states import EvaluationState, Verdict
from onbeat.streams.codec import RolloutGroup
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from onbeat.streams.ledger.logs import AuditLog
from services.broker.retention import Retention
from services.broker.views import alike as alike_module
from services.broker.views import groups as groups_module
from services.broker.views.alike import Alike
from tests.broker_fixtures import serving
from tests.waiting import eventually
from tests.world import LEASE_S, World, failed_group, make_group, tasks_for

TEXT = "Hi 😀!"
TOKEN_TEXTS = ["Hi", " ", "", "😀", "!", ""]  # the third is a part of the next one's character, the last a special one


async def get(broker: httpx.AsyncClient, path: str, status: int = 200) -> Any:
    answer = await broker.get(f"/v1/jobs/{path}")
    assert answer.status_code == status, answer.text
    return answer.json()


def no_change(group: RolloutGroup) -> None:
    pass


async def submit_open(ledger: Ledger, job_id: str, change: Callable[[RolloutGroup], None] = no_change) -> None:
    """Whatever is there to be claimed, each group with the text of its prompt."""
    for claim in await ledger.rollout.claim(job_id, "w1", 100, LEASE_S):
        group = make_group(claim.task)
        group.prompt_text = claim.task.messages[0].content if claim.task.messages else claim.task.text
        change(group)
        assert await ledger.rollout.submit(job_id, claim.entry_id, group) is Verdict.ACCEPTED


async def run_alone(ledger: Ledger, prompts: list[list[str]], **sections: Any) -> tuple[str, str]:
    """A job that no broker goes on with: its iterations have these prompts. Returns (job id, epoch)."""
    sections.setdefault("schedule", {"num_iterations": len(prompts)})
    job_id, epoch = await World(ledger).started_job(**sections)
    for iteration, texts in enumerate(prompts):
        tasks = tasks_for(iteration, len(texts))
        for task, text in zip(tasks, texts, strict=True):
            task.text = text
        assert await ledger.iterations.open(job_id, iteration, iteration, tasks) == ""
        await submit_open(ledger, job_id)
        await World(ledger).commit(job_id, epoch, iteration)
    return job_id, epoch


async def find_alike(broker: httpx.AsyncClient, job_id: str, group_id: str) -> list[str]:
    found = (await get(broker, f"{job_id}/groups/{group_id}/alike"))["groups"]
    assert [each["iteration"] for each in found] == [int(each["group_id"].split("-")[0]) for each in found]
    return [each["group_id"] for each in found]


# ---- samples -----------------------------------------------------------------------------------------------------


async def test_samples_have_their_place_and_advantages_once_trained(broker, world):
    job_id, epoch = await world.started_job()
    await world.wait_open(job_id, 0)
    await world.drain(job_id)
    before = (await get(broker, f"{job_id}/samples"))["samples"]
    assert [(s["group_id"], s["index"], s["advantage"]) for s in before] == [
        ("0-0", 0, None),
        ("0-1", 0, None),
        ("0-0", 1, None),
        ("0-1", 1, None),
    ]
    await world.commit(job_id, epoch, 0)  # which tells reward - 0.5
    after = (await get(broker, f"{job_id}/samples?iteration=0"))["samples"]
    assert [(s["reward"], s["advantage"]) for s in after] == [(0.0, -0.5), (0.0, -0.5), (1.0, 0.5), (1.0, 0.5)]
    assert {(s["iteration"], s["policy_version"]) for s in after} == {(0, 0)}
    assert [s["response"] for s in after] == ["response 0", "response 0", "response 1", "response 1"]


async def test_samples_are_paged_after_filtering_by_reward(broker, ledger):
    job_id, _ = await run_alone(ledger, [["a", "b", "c"]])

    async def chosen(query):
        found = (await get(broker, f"{job_id}/samples?iteration=0&{query}"))["samples"]
        return [(sample["group_id"], sample["index"]) for sample in found]

    ones = [("0-0", 1), ("0-1", 1), ("0-2", 1)]
    zeros = [("0-0", 0), ("0-1", 0), ("0-2", 0)]
    assert await chosen("min_reward=0.5") == await chosen("min_reward=1&max_reward=1") == ones  # ends belong to it
    assert await chosen("max_reward=0.999") == zeros
    assert await chosen("min_reward=-5&max_reward=5") == zeros + ones
    assert await chosen("min_reward=0.2&max_reward=0.8") == []
    assert await chosen("min_reward=0.5&limit=1&offset=1") == ones[1:2]
    assert await chosen("min_reward=0.5&offset=3") == []


async def test_range_of_rewards_that_is_none_is_refused(broker, world):
    job_id = await world.create_job()
    refused = await get(broker, f"{job_id}/samples?min_reward=2&max_reward=1.5", 422)
    assert refused["detail"] == "no reward is from 2 to 1.5: min_reward is above max_reward"
    for value in ("nan", "inf", "-inf", "1e999", "x"):
        refused = await get(broker, f"{job_id}/samples?min_reward={value}", 422)
        assert refused["errors"][0]["field"] == "min_reward"


# ---- one group ---------------------------------------------------------------------------------------------------


def with_tokens(group: RolloutGroup) -> None:
    """The first response has text for each token, the second does not know."""
    for response in group.responses:
        response.text = TEXT
        response.token_ids[:] = range(10, 16)
        response.rollout_logprobs[:] = [-0.1, -0.25, -3.0, -0.5, 0.0, -1.5]
        response.version_spans[0].end = 6
    group.responses[0].token_lengths[:] = map(len, TOKEN_TEXTS)
    group.responses[0].reward_parts["right"] = 0.75


async def test_group_is_shown_token_by_token(broker, ledger, world):
    job_id, epoch = await world.started_job()
    await world.wait_open(job_id, 0)
    await submit_open(ledger, job_id, with_tokens)
    await world.commit(job_id, epoch, 0)
    detail = await get(broker, f"{job_id}/groups/0-1")
    place = ("iteration", "group_id", "policy_version", "worker_id", "num_prompt_tokens", "generate_s", "failure")
    assert [detail[name] for name in place] == [0, "0-1", 0, "w1", 3, 0.1, ""]
    assert detail["prompt"].startswith("say ")
    known, unknown = detail["tokens"]
    assert [token["text"] for token in known] == TOKEN_TEXTS
    assert [token["id"] for token in known] == list(range(10, 16))
    assert [token["logprob"] for token in known] == [-0.1, -0.25, -3.0, -0.5, 0.0, -1.5]
    assert [token["text"] for token in unknown] == [None] * 6
    samples = (await get(broker, f"{job_id}/samples?iteration=0"))["samples"]
    assert detail["responses"] == [sample for sample in samples if sample["group_id"] == "0-1"]
    assert [response["advantage"] for response in detail["responses"]] == [-0.5, 0.5]
    assert detail["responses"][0]["reward_parts"] == {"right": 0.75}


async def test_group_that_failed_says_why(broker, ledger, world):
    job_id, _ = await world.started_job()
    await world.wait_open(job_id, 0)
    for claim in await ledger.rollout.claim(job_id, "w1", 100, LEASE_S):
        await ledger.rollout.submit(job_id, claim.entry_id, failed_group(claim.task))
    detail = await get(broker, f"{job_id}/groups/0-0")
    assert (detail["failure"], detail["responses"], detail["tokens"]) == ("reward_failed: it raised", [], [])
    (alone, _) = (await get(broker, f"{job_id}/groups/0-0/alike"))["groups"]  # both have no prompt
    assert (alone["num_responses"], alone["reward_mean"]) == (0, None)


async def test_group_that_is_not_there_is_told_apart(broker, world):
    job_id, _ = await world.started_job()
    await world.wait_open(job_id, 0)
    for path in ("", "/alike"):
        assert "has not been accepted yet" in (await get(broker, f"{job_id}/groups/0-0{path}", 404))["detail"]
        for unknown in ("0-2", "7-0", "0-00", "999999999-999999999"):
            detail = (await get(broker, f"{job_id}/groups/{unknown}{path}", 404))["detail"]
            assert f"{unknown} is no group of this job" in detail
        for malformed in ("nobody", "0", "0-0-0", "eval-0", "1٣-0", "1" * 50 + "-0"):
            refused = await get(broker, f"{job_id}/groups/{malformed}{path}", 422)
            assert refused["errors"][0]["field"] == "group_id"
        await get(broker, f"nobody/groups/0-0{path}", 404)
    detail = (await get(broker, f"{job_id}/groups/eval-0-1", 404))["detail"]
    assert "groups of evaluations are not kept; /evaluations/0/samples" in detail


async def test_tokens_of_a_huge_group_are_cut_by_whole_responses(broker, ledger, monkeypatch):
    monkeypatch.setattr(groups_module, "MAX_TOKENS", 3)  # responses have two each
    job_id, _ = await run_alone(ledger, [["a"]])
    detail = await get(broker, f"{job_id}/groups/0-0")
    assert [len(tokens) for tokens in detail["tokens"]] == [2, 0]
    assert len(detail["responses"]) == 2


async def test_logprob_that_is_no_number_leaves_the_answer_valid(broker, ledger, world):
    job_id, _ = await world.started_job()
    await world.wait_open(job_id, 0)

    def spoil(group):
        group.responses[0].rollout_logprobs[:] = [float("nan"), float("-inf")]

    await submit_open(ledger, job_id, spoil)
    detail = await get(broker, f"{job_id}/groups/0-0")
    assert [token["logprob"] for token in detail["tokens"][0]] == [-1e6, -1e6]


async def test_what_is_no_longer_kept_is_gone_and_not_alike(broker, ledger):
    job_id, epoch = await run_alone(ledger, [["a", "b"]] * 3, retention={"rollout_iterations": 1})
    assert await find_alike(broker, job_id, "0-0") == ["0-0", "1-0", "2-0"]
    assert await ledger.redis.exists(JobKeys(job_id).advantages(0))
    await ledger.trainer.checkpointed(job_id, epoch, 0, 2, "/c/2")
    await Retention(ledger, 0).step()
    for path in ("", "/alike"):
        assert "no longer kept" in (await get(broker, f"{job_id}/groups/0-0{path}", 410))["detail"]
    assert await find_alike(broker, job_id, "2-1") == ["1-1", "2-1"]
    assert not await ledger.redis.exists(JobKeys(job_id).advantages(0))
    assert await ledger.redis.exists(JobKeys(job_id).advantages(1))


async def test_client_reads_samples_groups_and_what_is_alike(ledger, tmp_path):
    job_id, _ = await run_alone(ledger, [["a", "b"], ["b", "a"]])
    async with serving(ledger, tmp_path) as broker, AsyncClient(broker.url) as client:
        (sample,) = await client.jobs.samples(job_id, iteration=1, min_reward=1, limit=1)
        assert (sample.index, sample.reward, sample.advantage) == (1, 1.0, 0.5)
        detail = await client.jobs.group(job_id, sample.group_id)
        assert detail.responses[1] == sample
        assert [token.logprob for token in detail.tokens[1]] == [-0.5, -0.25]
        found = await client.jobs.alike(job_id, sample.group_id)
        assert [(each.group_id, each.policy_version, each.num_responses, each.reward_mean) for each in found] == [
            ("0-1", 0, 2, 0.5),
            ("1-0", 1, 2, 0.5),
        ]
        with pytest.raises(ApiError, match="is no group of this job"):
            await client.jobs.group(job_id, "5-0")


# ---- advantages in the ledger --------------------------------------------------------------------------------------


async def test_advantages_come_with_the_commit_and_only_with_the_first(ledger, world):
    job_id, epoch = await world.started_job()
    assert await ledger.iterations.open(job_id, 0, 0, tasks_for(0)) == ""
    place = (job_id, epoch, 0, 1, "d1", {}, "used", True)
    with pytest.raises(AssertionError, match="iteration 0 is open"):
        await ledger.trainer.commit(*place, {"0-0": [1.0, -1.0]})
    assert await ledger.iterations.advantages(job_id, 0) == {}
    await world.drain(job_id)
    assert await ledger.trainer.commit(*place, {"0-0": [0.5, None]})
    assert not await ledger.trainer.commit(*place, {"0-0": [9.0, 9.0]})  # replayed
    assert await ledger.iterations.advantages(job_id, 0) == {"0-0": [0.5, None]}


# ---- the same prompt -----------------------------------------------------------------------------------------------


async def test_rows_of_a_small_data_set_are_alike_in_every_epoch(broker, ledger, world):
    job_id, epoch = await world.started_job(schedule={"num_iterations": 7})  # 14 prompts of 5 rows
    prompts: dict[str, str] = {}

    def note(group):
        prompts[group.group_id] = group.prompt_text

    for iteration in range(7):
        await world.wait_open(job_id, iteration)
        await submit_open(ledger, job_id, note)
        for group_id in (f"{iteration}-0", "0-1"):  # it goes on reading where it was
            expected = [other for other, prompt in prompts.items() if prompt == prompts[group_id]]
            assert await find_alike(broker, job_id, group_id) == sorted(expected)
        await world.commit(job_id, epoch, iteration)
    assert max(Counter(prompts.values()).values()) == 3
    for group_id, prompt in prompts.items():
        found = await find_alike(broker, job_id, group_id)
        assert found == sorted(other for other in prompts if prompts[other] == prompt)


async def test_order_is_that_of_numbers(broker, ledger):
    job_id, _ = await run_alone(ledger, [["a"] * 11, *[["b"]] * 9, ["a"]])
    assert await find_alike(broker, job_id, "10-0") == [*(f"0-{i}" for i in range(11)), "10-0"]


async def test_each_group_is_read_once_however_often_it_is_asked_for(broker, ledger, monkeypatch):
    read: list[str] = []

    async def count(*args, call=AuditLog.rollouts):
        found = await call(*args)
        read.extend(entry for entry, _ in found)
        return found

    monkeypatch.setattr(AuditLog, "rollouts", count)
    job_id, _ = await run_alone(ledger, [["a", "b"]] * 20)
    answers = await asyncio.gather(*(find_alike(broker, job_id, f"{i}-0") for i in range(20)))  # all at once
    assert answers == [[f"{i}-0" for i in range(20)]] * 20
    assert len(read) == len(set(read)) == 40


async def test_strangers_entries_are_not_alike(broker, ledger):
    job_id, _ = await run_alone(ledger, [["a", "b"]])
    stored = await ledger.redis.xrange(JobKeys(job_id).rollouts)
    true = RolloutGroup.FromString(stored[0][1][b"group"])
    unknown, odd = RolloutGroup(), RolloutGroup()
    unknown.CopyFrom(true)
    odd.CopyFrom(true)
    unknown.group_id, odd.group_id = "5-0", "no number"
    for payload in (true, unknown, odd):  # played again; never dispatched
        await ledger.redis.xadd(JobKeys(job_id).rollouts, {"group": payload.SerializeToString()})
    await ledger.redis.xadd(JobKeys(job_id).rollouts, {"group": b"\xff"})
    await ledger.redis.xadd(JobKeys(job_id).rollouts, {"other": b""})
    assert await find_alike(broker, job_id, "0-0") == ["0-0"]


async def test_index_keeps_the_newest_groups_of_the_newest_jobs(broker, ledger, monkeypatch):
    monkeypatch.setattr(alike_module, "MAX_GROUPS", 4)
    monkeypatch.setattr(alike_module, "MAX_JOBS", 2)
    jobs = [(await run_alone(ledger, [["a", "b"]] * 5))[0] for _ in range(3)]
    index, read = Alike(ledger), []
    decode = alike_module.decode_group
    monkeypatch.setattr(alike_module, "decode_group", lambda payload: read.append(payload) or decode(payload))
    await index.find(jobs[0], "a")
    assert len(read) == 4  # older groups are not even read
    for job_id in (*jobs, jobs[1]):
        assert [each.group_id for each in await index.find(job_id, "a")] == ["3-0", "4-0"]
    assert [len(index._index_of(job_id).places) for job_id in (jobs[1], jobs[2], jobs[0])] == [4, 4, 0]
    assert await index.find(jobs[1], "c") == []
    assert await find_alike(broker, jobs[0], "1-0") == ["1-0", "3-0", "4-0"]  # itself, though it is too old


async def test_excess_readers_are_asked_to_retry_and_then_served(broker, ledger, monkeypatch):
    job_id, _ = await run_alone(ledger, [["a", "b"]] * 20)
    num_read = 0

    async def slowly(*args, call=AuditLog.rollouts):
        nonlocal num_read
        found = await call(*args)
        num_read += len(found)
        await asyncio.sleep(0.06)
        return found

    monkeypatch.setattr(AuditLog, "rollouts", slowly)
    monkeypatch.setattr(alike_module, "READ_S", 0.15)  # two slices of 16, or fewer
    refused = await broker.get(f"/v1/jobs/{job_id}/groups/0-0/alike")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "still being read; ask again" in refused.json()["detail"]
    monkeypatch.setattr(alike_module, "READ_S", 10.0)
    num_read_before = num_read
    assert len(await find_alike(broker, job_id, "0-0")) == 20
    assert num_read_before > 0
    assert num_read <= 40 + alike_module.SLICE  # at most the slice in which it was cut off is read again


async def test_held_out_prompt_is_alike_in_every_finished_evaluation(broker, ledger, world):
    held_out = {"data": {"type": "jsonl", "path": "prompts.jsonl"}, "num_prompts": 2, "num_samples_per_prompt": 2}
    held_out["every_iterations"] = 1
    job_id, epoch = await world.started_job(evaluation=held_out, schedule={"num_iterations": 2})
    for iteration in range(3):

        async def is_done(number=iteration):
            await submit_open(ledger, job_id)
            return await ledger.evaluations.state(job_id, number) is EvaluationState.DONE

        if iteration < 2:
            await world.wait_open(job_id, iteration)
        await eventually(f"evaluation {iteration} is done", is_done)
        if iteration < 2:
            await world.commit(job_id, epoch, iteration)
    found = (await get(broker, f"{job_id}/groups/eval-1-0/alike"))["groups"]
    assert [(each["iteration"], each["group_id"], each["policy_version"]) for each in found] == [
        (0, "eval-0-0", 0),
        (1, "eval-1-0", 1),
        (2, "eval-2-0", 2),
    ]
    assert [(each["num_responses"], each["reward_mean"]) for each in found] == [(2, 0.5)] * 3
    samples = (await get(broker, f"{job_id}/evaluations/2/samples"))["samples"]
    assert [(s["group_id"], s["index"]) for s in samples] == [(f"eval-2-{i}", k) for k in (0, 1) for i in (0, 1)]
    for missing in ("eval-0-9", "eval-7-0"):
        assert "that are kept" in (await get(broker, f"{job_id}/groups/{missing}/alike", 404))["detail"]
