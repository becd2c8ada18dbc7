"""Samples of a policy over REST on a whole broker: by reward, and groups token by token."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from onbeat.client import AsyncClient
from onbeat.contracts.errors import ApiError, JobFailed
from onbeat.contracts.states import Verdict
from onbeat.streams.codec import PromptPart, RolloutGroup
from onbeat.streams.keys import JobKeys
from onbeat.streams.ledger import Ledger
from services.broker.retention import Retention
from services.broker.views import groups as groups_module
from tests.broker_fixtures import serving
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
    """Claim and submit all prompts, each group with the text of its prompt."""
    for claim in await ledger.rollout.claim(job_id, "w1", 100, LEASE_S):
        group = make_group(claim.task)
        group.prompt_text = claim.task.messages[0].content if claim.task.messages else claim.task.text
        change(group)
        assert await ledger.rollout.submit(job_id, claim.entry_id, group) is Verdict.ACCEPTED


async def run_alone(ledger: Ledger, prompts: list[list[str]], **sections: Any) -> tuple[str, str]:
    """Run a job, without a broker, whose iterations have these prompts; return (job id, epoch)."""
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
    await world.commit(job_id, epoch, 0)  # the commit reports reward - 0.5
    after = (await get(broker, f"{job_id}/samples?iteration=0"))["samples"]
    assert [(s["reward"], s["advantage"]) for s in after] == [(0.0, -0.5), (0.0, -0.5), (1.0, 0.5), (1.0, 0.5)]
    assert {(s["iteration"], s["policy_version"]) for s in after} == {(0, 0)}
    assert [s["response"] for s in after] == ["response 0", "response 0", "response 1", "response 1"]


async def test_samples_are_paged_after_filtering_by_reward(broker, ledger):
    job_id, _ = await run_alone(ledger, [["a", "b", "c"]])

    async def chosen(query):
        samples = (await get(broker, f"{job_id}/samples?iteration=0&{query}"))["samples"]
        return [(sample["group_id"], sample["index"]) for sample in samples]

    ones = [("0-0", 1), ("0-1", 1), ("0-2", 1)]
    zeros = [("0-0", 0), ("0-1", 0), ("0-2", 0)]
    assert await chosen("min_reward=0.5") == await chosen("min_reward=1&max_reward=1") == ones  # ends belong to it
    assert await chosen("max_reward=0.999") == zeros
    assert await chosen("min_reward=-5&max_reward=5") == zeros + ones
    assert await chosen("min_reward=0.2&max_reward=0.8") == []
    assert await chosen("min_reward=0.5&limit=1&offset=1") == ones[1:2]
    assert await chosen("min_reward=0.5&offset=3") == []


async def job_with_cut_responses(ledger: Ledger) -> str:
    """Make a job whose first responses are truncated and wrong."""

    def cut_the_first(group: RolloutGroup) -> None:
        group.responses[0].finish_reason = "length"
        group.responses[1].text = f"The ANSWER to {group.prompt_text}"

    job_id, _ = await World(ledger).started_job(solved_at=0.5)
    tasks = tasks_for(0, 2)
    tasks[0].text, tasks[1].text = "Ärger", "peace"
    assert await ledger.iterations.open(job_id, 0, 0, tasks) == ""
    await submit_open(ledger, job_id, cut_the_first)
    return job_id


async def test_samples_are_chosen_by_their_end_and_by_text(broker, ledger):
    job_id = await job_with_cut_responses(ledger)

    async def chosen(query):
        samples = (await get(broker, f"{job_id}/samples?iteration=0&{query}"))["samples"]
        return [(sample["group_id"], sample["index"]) for sample in samples]

    first, second = [("0-0", 0), ("0-1", 0)], [("0-0", 1), ("0-1", 1)]  # rewards 0 and 1
    assert await chosen("is_truncated=true") == await chosen("is_solved=false") == first
    assert await chosen("is_truncated=false") == await chosen("is_solved=true") == second
    assert await chosen("is_truncated=true&is_solved=true") == []
    assert await chosen("text=answer") == second
    assert await chosen("text=%C3%84RGER") == [("0-0", 0), ("0-0", 1)]  # upper case also matches
    assert await chosen("text=answer&limit=1&offset=1") == second[1:]
    assert await chosen("text=nothing") == []


async def test_range_of_rewards_that_is_none_is_refused(broker, world):
    job_id = await world.create_job()
    refused = await get(broker, f"{job_id}/samples?min_reward=2&max_reward=1.5", 422)
    assert refused["detail"] == "no reward is from 2 to 1.5: min_reward is above max_reward"
    for value in ("nan", "inf", "-inf", "1e999", "x"):
        refused = await get(broker, f"{job_id}/samples?min_reward={value}", 422)
        assert refused["errors"][0]["field"] == "min_reward"


# ---- one group ---------------------------------------------------------------------------------------------------


async def test_group_is_shown_token_by_token(broker, ledger, world):
    def with_tokens(group: RolloutGroup) -> None:
        """Give the first response the text of each token; the second one has no such texts."""
        for response in group.responses:
            response.text = TEXT
            response.token_ids[:] = range(10, 16)
            response.rollout_logprobs[:] = [-0.1, -0.25, -3.0, -0.5, 0.0, -1.5]
            response.version_spans[0].end = 6
        group.responses[0].token_lengths[:] = map(len, TOKEN_TEXTS)
        group.responses[0].reward_parts["right"] = 0.75

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


async def test_group_that_is_not_there_is_told_apart(broker, world):
    job_id, _ = await world.started_job()
    await world.wait_open(job_id, 0)
    assert "has not been accepted yet" in (await get(broker, f"{job_id}/groups/0-0", 404))["detail"]
    for unknown in ("0-2", "7-0", "0-00", "999999999-999999999"):
        detail = (await get(broker, f"{job_id}/groups/{unknown}", 404))["detail"]
        assert f"{unknown} is no group of this job" in detail
    for malformed in ("nobody", "0", "0-0-0", "eval-0", "1٣-0", "1" * 50 + "-0"):
        refused = await get(broker, f"{job_id}/groups/{malformed}", 422)
        assert refused["errors"][0]["field"] == "group_id"
    await get(broker, "nobody/groups/0-0", 404)
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


async def test_group_that_is_no_longer_kept_is_gone(broker, ledger):
    job_id, epoch = await run_alone(ledger, [["a", "b"]] * 3, retention={"rollout_iterations": 1})
    await get(broker, f"{job_id}/groups/0-0")
    assert await ledger.redis.exists(JobKeys(job_id).advantages(0))
    await ledger.trainer.checkpointed(job_id, epoch, 0, 2, "/c/2")
    await Retention(ledger, 0).step()
    assert "no longer kept" in (await get(broker, f"{job_id}/groups/0-0", 410))["detail"]
    assert (await get(broker, f"{job_id}/groups/1-1"))["group_id"] == "1-1"
    assert not await ledger.redis.exists(JobKeys(job_id).advantages(0))
    assert await ledger.redis.exists(JobKeys(job_id).advantages(1))


async def test_client_reads_samples_and_groups(ledger, tmp_path):
    job_id, _ = await run_alone(ledger, [["a", "b"], ["b", "a"]])
    async with serving(ledger, tmp_path) as broker, AsyncClient(broker.url) as client:
        (sample,) = await client.jobs.samples(job_id, iteration=1, min_reward=1, limit=1)
        assert (sample.index, sample.reward, sample.advantage) == (1, 1.0, 0.5)
        detail = await client.jobs.group(job_id, sample.group_id)
        assert detail.responses[1] == sample
        assert [token.logprob for token in detail.tokens[1]] == [-0.5, -0.25]
        with pytest.raises(ApiError, match="is no group of this job"):
            await client.jobs.group(job_id, "5-0")


async def test_client_chooses_samples_by_end_reward_and_text(ledger, tmp_path):
    job_id = await job_with_cut_responses(ledger)
    first, second = [("0-0", 0), ("0-1", 0)], [("0-0", 1), ("0-1", 1)]
    async with serving(ledger, tmp_path) as broker, AsyncClient(broker.url) as client:
        for choice, expected in (
            ({"truncated": True}, first),
            ({"wrong": True}, first),
            ({"search": "answer"}, second),
            ({"truncated": True, "search": "answer"}, []),
            ({"truncated": False, "wrong": False, "search": ""}, first + second),
        ):
            samples = await client.jobs.samples(job_id, **choice)
            assert [(sample.group_id, sample.index) for sample in samples] == expected, choice


# ---- advantages in the ledger --------------------------------------------------------------------------------------


async def test_advantages_come_with_the_commit_and_only_with_the_first(ledger, world):
    job_id, epoch = await world.started_job()
    assert await ledger.iterations.open(job_id, 0, 0, tasks_for(0)) == ""
    place = (job_id, epoch, 0, 1, "d1", {}, "used", True)
    with pytest.raises(JobFailed, match="iteration 0 is open in Redis, and its groups were trained"):
        await ledger.trainer.commit(*place, {"0-0": [1.0, -1.0]})
    assert await ledger.iterations.advantages(job_id, 0) == {}
    await world.drain(job_id)
    assert await ledger.trainer.commit(*place, {"0-0": [0.5, None]})
    assert not await ledger.trainer.commit(*place, {"0-0": [9.0, 9.0]})  # replayed
    assert await ledger.iterations.advantages(job_id, 0) == {"0-0": [0.5, None]}


# ---- the prompt that the model saw -------------------------------------------------------------------------------


async def test_prompt_that_the_model_saw_is_beside_the_text(broker, ledger, world):
    job_id, _ = await world.started_job()
    await world.wait_open(job_id, 0)

    def with_parts(group: RolloutGroup) -> None:
        if group.group_id == "0-0":
            texts = [PromptPart(text="<s>", is_special=True), PromptPart(num_left_out=7), PromptPart(text="Hi <s>")]
            group.prompt_parts.extend(texts)

    await submit_open(ledger, job_id, with_parts)
    detail = await get(broker, f"{job_id}/groups/0-0")
    assert detail["prompt"].startswith("say ")
    assert detail["prompt_parts"] == [
        {"text": "<s>", "is_special": True, "num_left_out": 0},
        {"text": "", "is_special": False, "num_left_out": 7},
        {"text": "Hi <s>", "is_special": False, "num_left_out": 0},
    ]
    assert (await get(broker, f"{job_id}/groups/0-1"))["prompt_parts"] == []
    seen, unknown, *_ = (await get(broker, f"{job_id}/samples"))["samples"]
    assert (seen["decoded_prompt"], unknown["decoded_prompt"]) == ("<s>[7 tokens are left out here]Hi <s>", None)
