"""The reward judge in mode `pairs`: which pairs are compared, in which order, and what their answers become."""

import json
import math
from collections import Counter

import pytest
from prometheus_client import REGISTRY

from onbeat.config import JobConfig
from services.broker.admission.review import review_held_out_judges
from services.broker.datasets import PromptItem
from services.broker.tasks import build_tasks
from services.rollout.responder import reward_requests
from services.rollout.rewards.judge import pairs_of
from services.rollout.rewards.outcome import RewardRefused
from tests.integration.rollout.test_judge import (
    INJECTIONS,
    RUBRIC,
    completes,
    judges,
    request,
    score,
    scorer,  # noqa: F401
    sections_of,
)
from tests.integration.rollout.test_reward_services import Call, says, service  # noqa: F401
from tests.world import job_body

TEXTS = ["a", "bbbb", "ccc", "dd", "eeeee"]


def longer(responses: list[str]) -> object:
    first, second = map(len, responses)
    return {"better": 0 if first == second else 1 if first > second else 2}


def count_of(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"onbeat_rollout_{name}", labels) or 0.0


@pytest.mark.parametrize("num", range(2, 12))
@pytest.mark.parametrize("opponents", [2, 4, 6, 64])
def test_each_response_meets_as_many_others(num, opponents):
    pairs = pairs_of(range(num), opponents)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs)
    assert {first != second for first, second in pairs} == {True}
    met, met_first = Counter(index for pair in pairs for index in pair), Counter(first for first, _ in pairs)
    assert set(met.values()) == {min(opponents, num - 1)}
    is_even = min(opponents, num - 1) % 2 == 0
    assert all(abs(met_first[index] - met[index] / 2) == (0 if is_even else 0.5) for index in range(num))


async def test_reward_is_the_share_of_pairs_won(scorer, service):  # noqa: F811
    service.will(judges(longer))
    assert await score(scorer, request(*TEXTS, mode="pairs")) == [0.0, 0.75, 0.5, 0.25, 1.0]
    assert len(service.calls) == 10
    assert {len(sections_of(call)) for call in service.calls} == {4}
    body = service.calls[0].body
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["better"]
    assert RUBRIC in body["messages"][0]["content"]
    assert "of the row" not in json.dumps(body)


async def test_cost_is_bounded_by_opponents(scorer, service):  # noqa: F811
    service.will(judges(longer))
    texts = ["x" * number for number in range(1, 9)]
    rewards = await score(scorer, request(*texts, mode="pairs", opponents=2))
    assert len(service.calls) == 8
    assert set(rewards) <= {0.0, 0.5, 1.0}
    assert (rewards[0], rewards[-1]) == (0.0, 1.0)


async def test_order_is_drawn_from_the_seed_of_the_group(scorer, service):  # noqa: F811
    service.will(judges(longer))

    async def pairs_shown(seed: int) -> set[tuple[str, ...]]:
        before = len(service.calls)
        await score(scorer, request(*TEXTS, mode="pairs", opponents=2, seed=seed))
        return {tuple(sections_of(call)[2:]) for call in service.calls[before:]}

    first = await pairs_shown(1)
    assert await pairs_shown(1) == set(), "a repeated call costs nothing"
    assert len(first) == 5
    assert await pairs_shown(2) - first, "another group is shown in another order"


async def test_same_seed_shows_the_same_pairs_again(scorer, service):  # noqa: F811
    service.will(judges(longer))
    shown = []
    for rubric in ("One", "Another"):  # the second one is not answered from the cache
        await score(scorer, request(*TEXTS, mode="pairs", opponents=2, seed=5, rubric=rubric))
        shown.append({tuple(sections_of(call)[2:]) for call in service.calls})
        service.calls.clear()
    assert shown[0] == shown[1]


async def test_ties_are_halves_and_equal_texts_cost_nothing(scorer, service):  # noqa: F811
    service.will(judges(longer))
    assert await score(scorer, request("aa", "bb", "c", mode="pairs")) == [0.75, 0.75, 0.0]
    assert len(service.calls) == 3
    service.calls.clear()
    assert await score(scorer, request("same", "same", "same", mode="pairs")) == [0.5] * 3
    assert service.calls == []


async def test_judge_that_prefers_a_place_prefers_no_response(scorer, service):  # noqa: F811
    before = {half: count_of("judge_reward_by_place_sum", half=half) for half in ("first", "second")}
    service.will(completes('{"better": 1}'))
    assert await score(scorer, request(*TEXTS, mode="pairs")) == [0.5] * 5
    after = {half: count_of("judge_reward_by_place_sum", half=half) for half in ("first", "second")}
    assert {half: after[half] - before[half] for half in after} == {"first": 10.0, "second": 0.0}


@pytest.mark.parametrize("text", INJECTIONS)
async def test_response_cannot_leave_its_marks(scorer, service, text):  # noqa: F811
    service.will(judges(longer))
    texts = [text, "a polite answer, which is longer than any of the injections that are tried in this test, by far"]
    assert await score(scorer, request(*texts, mode="pairs")) == [0.0, 1.0]
    (call,) = service.calls
    assert sorted(sections_of(call)[2:]) == sorted(texts)
    assert not text.strip() or text not in call.body["messages"][0]["content"]


def wrong_for(*wrong: str):
    """Answers with prose where one of these responses is shown."""

    async def behave(call: Call, writer) -> None:
        shown = sections_of(call)[2:]
        answer = "Both are fine." if {*shown} & {*wrong} else json.dumps(longer(shown))
        await completes(answer)(call, writer)

    return behave


async def test_failed_pair_is_no_opinion_on_that_pair(scorer, service):  # noqa: F811
    async def behave(call: Call, writer) -> None:
        shown = sections_of(call)[2:]
        await completes("" if {*shown} == {"a", "eeeee"} else json.dumps(longer(shown)))(call, writer)

    failed = count_of("judge_pairs_total", outcome="failed")
    service.will(behave)
    assert await score(scorer, request(*TEXTS, max_attempts=3, mode="pairs")) == [0.0, 0.75, 0.5, 0.25, 1.0]
    assert len(service.calls) == 9 + 3
    assert count_of("judge_pairs_total", outcome="failed") - failed == 1


async def test_response_without_a_judged_pair_has_no_reward(scorer, service):  # noqa: F811
    service.will(wrong_for("ccc"))
    rewards = await score(scorer, request(*TEXTS, mode="pairs"))
    assert rewards == pytest.approx([0.0, 2 / 3, None, 1 / 3, 1.0])


@pytest.mark.parametrize("content", ["", None, "1", '{"better": 3}', '{"better": true}', '{"better": NaN}', "{}"])
async def test_group_without_a_judged_pair_fails(scorer, service, content):  # noqa: F811
    service.will(completes(content))
    with pytest.raises(RewardRefused, match="invalid: judge grader did not answer with the JSON") as refused:
        await score(scorer, request("hello", "good day", max_attempts=2, mode="pairs"))
    assert (refused.value.retry_after_s, len(service.calls)) == (math.inf, 2)


async def test_busy_judge_is_asked_again_for_missing_pairs(scorer, service):  # noqa: F811
    service.will(says({}, "429 Too Many Requests"), judges(longer))
    assert await score(scorer, request("a", "bb", "ccc", mode="pairs")) == [0.0, 0.5, 1.0]
    assert len(service.calls) == 4


async def test_refusal_of_the_endpoint_fails_the_group(scorer, service):  # noqa: F811
    service.will(says({}, "401 Unauthorized"))
    with pytest.raises(RewardRefused, match="answers 401"):
        await score(scorer, request("a", "bb", mode="pairs"))


def test_equal_groups_in_two_slots_have_two_seeds():
    item = PromptItem(messages=[{"role": "user", "content": "Hello"}], context={"question": "Hello"})
    reward = {"name": "judge", "options": {"service": "grader", "rubric": RUBRIC}}

    def seeds(job_seed: int) -> list[int]:
        config = JobConfig.model_validate(job_body(reward=reward, seed=job_seed))
        tasks = build_tasks(config, 0, [item, item])
        return [asked.seed for task in tasks for asked in reward_requests(task, max_attempts=1)]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4


@pytest.mark.parametrize("mode", ["ranking", "pairs"])
def test_one_held_out_response_cannot_be_compared(mode):
    reward = {"name": "judge", "options": {"service": "grader", "rubric": RUBRIC, "mode": mode}}
    held_out = {"data": {"type": "jsonl", "path": "held-out.jsonl"}, "num_prompts": 2, "temperature": 1.0}

    def complaints(num_samples: int) -> list[tuple[str, str]]:
        evaluation = held_out | {"num_samples_per_prompt": num_samples}
        return review_held_out_judges(JobConfig.model_validate(job_body(reward=reward, evaluation=evaluation)))

    ((field, message),) = complaints(1)
    assert field == "evaluation.num_samples_per_prompt"
    assert message.startswith(f"mode = '{mode}' of reward judge compares the responses to a prompt")
    assert complaints(2) == []
