"""Rewards without an opinion: what a function, a service and the wire make of None."""

import pytest

from onbeat import engines
from onbeat.config.rollout import RolloutConfig
from onbeat.engines import GeneratedResponse
from onbeat.streams.codec import (
    Response,
    RolloutGroup,
    VersionSpan,
    check_group,
    decode_group,
    encode_group,
    given_rewards,
)
from services.rollout.children.numbers import InvalidReward
from services.rollout.environments.child import Rewards
from services.rollout.responder import to_response
from services.rollout.rewards.functions import read_score, read_scores
from services.rollout.rewards.outcome import RewardRequest, Score, weigh
from services.rollout.rewards.pool import RewardPool
from services.rollout.rewards.service import read_scores as read_scores_of_service
from services.rollout.rewards.truncation import reward_truncated

NOTHING = {"reward": None, "parts": {}}


def ask(part: str = "", weight: float = 1.0) -> RewardRequest:
    return RewardRequest("any", {}, {}, ["a", "b"], 1.0, 64, 1, weight=weight, part=part)


def response(**fields) -> Response:
    spans = [VersionSpan(policy_version=0, start=0, end=1)]
    return Response(token_ids=[1], rollout_logprobs=[-0.5], version_spans=spans, **fields)


def group_of(*responses: Response) -> RolloutGroup:
    return RolloutGroup(group_id="0-0", prompt_token_ids=[1], responses=responses)


def test_none_is_no_opinion_also_on_parts():
    assert read_score(None) == NOTHING
    assert read_score({"reward": None, "short": 1}) == {"reward": None, "parts": {"short": 1.0}}
    assert read_score({"reward": 0.5, "right": None}) == {"reward": 0.5, "parts": {}}
    assert read_scores([1, None], 2) == [{"reward": 1.0, "parts": {}}, NOTHING]
    with pytest.raises(InvalidReward, match="it returned None"):
        read_scores(None, 2)


def test_null_of_a_service_is_no_opinion():
    answer = b'{"scores": [null, {"reward": null, "form": 1.0}, {"reward": 1.0, "form": null}]}'
    assert read_scores_of_service("judge", answer, 3) == [Score(None, {}), Score(None, {"form": 1.0}), Score(1.0, {})]


def test_the_sum_leaves_out_rewards_without_an_opinion():
    right, form = [Score(1.0, {}), Score(None, {})], [Score(None, {"short": 1.0}), Score(None, {})]
    assert weigh([ask("right", 0.9), ask("form", 0.1)], [right, form]) == [
        Score(0.9, {"right": 1.0, "form.short": 1.0}),
        Score(None, {}),
    ]


def test_response_without_a_reward_is_recorded_as_such(generated):
    recorded = group_of(to_response(generated, Score(None, {}), []), to_response(generated, Score(0.0, {}), []))
    check_group(recorded)
    assert [response.has_no_reward for response in decode_group(encode_group(recorded)).responses] == [True, False]


@pytest.fixture
def generated() -> GeneratedResponse:
    """Return a response as the engine gives it."""
    return GeneratedResponse([1], [-0.5], "stop", [engines.VersionSpan(policy_version=0, start=0, end=1)], "a")


def test_reward_of_zero_on_an_old_record_is_a_reward():
    """Protobuf leaves out a 0, so that only the field of its own can say that there is none."""
    old = encode_group(group_of(response(reward=0.0)))
    assert given_rewards(decode_group(old)) == [0.0]
    assert encode_group(group_of(response(reward=0.0, has_no_reward=False))) == old  # digests stay


def test_a_reward_beside_no_reward_is_refused():
    with pytest.raises(ValueError, match=r"it has no reward, and its reward is 1\.0"):
        check_group(group_of(response(reward=1.0, has_no_reward=True)))


def test_zero_for_cut_responses_is_an_opinion():
    group = group_of(response(finish_reason="length", has_no_reward=True), response(finish_reason="stop", reward=1.0))
    limits = RolloutConfig(num_prompts_per_iteration=1, num_samples_per_prompt=2, max_response_tokens=8)
    reward_truncated(group, limits)
    assert group.responses[0].has_no_reward
    reward_truncated(group, limits.model_copy(update={"truncated": "zero"}))
    assert (group.responses[0].reward, group.responses[0].has_no_reward) == (0.0, False)


async def test_episode_needs_a_number_of_its_installed_reward(monkeypatch):
    async def abstain(self, request, indexes, scores, deadline):
        scores[0] = Score(None, {})

    monkeypatch.setattr(RewardPool, "score", abstain)
    with pytest.raises(InvalidReward, match="the reward judge has no opinion on the answer, and an episode needs a"):
        await Rewards(64).score("judge", {}, {}, "4")
