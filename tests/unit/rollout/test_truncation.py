"""`rollout.truncated`: the reward of a response that was cut at its limit of tokens."""

import copy
import itertools
import math
from typing import Any, Literal

import pytest
from pydantic import ValidationError

from onbeat.config import JobConfig
from onbeat.streams.codec import Response, RolloutGroup, Turn, encode_group
from services.rollout.inflight import Flight
from services.rollout.meters import BusyMeter
from services.rollout.producer import GroupProducer
from services.rollout.prompt_decoder import PromptDecoder
from services.rollout.rewards.truncation import reward_truncated
from tests.episode_rig import flight_of, tokenizer_of
from tests.world import job_body

Rule = Literal["score", "zero", "mask"]
OUTCOMES = {("stop", 1.0): 0.2, ("stop", 0.0): 0.3, ("length", 1.0): 0.1, ("length", 0.0): 0.4}  # probabilities


def response(finish_reason: str, reward: float, *turns: str) -> Response:
    return Response(
        token_ids=[1],
        rollout_logprobs=[-0.5],
        version_spans=[{"policy_version": 1, "start": 0, "end": 1}],
        finish_reason=finish_reason,
        reward=reward,
        reward_parts={"right": reward},
        turns=[Turn(finish_reason=reason) for reason in turns],
    )


def group_of(*responses: Response, is_evaluation: bool = False) -> RolloutGroup:
    return RolloutGroup(group_id="0-0", prompt_token_ids=[1], responses=responses, is_evaluation=is_evaluation)


def rewards_by(rule: Rule, group: RolloutGroup, **rollout: Any) -> list[float]:
    group = copy.deepcopy(group)
    reward_truncated(group, job(truncated=rule, **rollout).rollout)
    return [response.reward for response in group.responses]


def test_zero_takes_the_reward_of_cut_responses_alone() -> None:
    group = group_of(response("stop", 1.0), response("length", 1.0), response("length", 0.0))
    assert rewards_by("zero", group) == [1.0, 0.0, 0.0]
    reward_truncated(group, job(truncated="zero").rollout)
    assert [dict(response.reward_parts) for response in group.responses] == [{"right": 1.0}] * 2 + [{"right": 0.0}]


@pytest.mark.parametrize("rule", ["score", "mask"])
def test_score_and_mask_leave_every_byte_of_a_group(rule: Rule) -> None:
    group = group_of(response("stop", 1.0), response("length", 1.0))
    before = encode_group(group)
    reward_truncated(group, job(truncated=rule).rollout)
    assert encode_group(group) == before


def test_held_out_groups_are_scored_as_they_are() -> None:
    held_out = group_of(response("length", 1.0), is_evaluation=True)
    assert rewards_by("zero", held_out, overlong_cache=4) == [1.0]


def test_a_cut_response_gets_the_reward_that_the_job_names() -> None:
    group = group_of(response("stop", -0.5), response("length", 1.0))
    assert rewards_by("zero", group, truncated_reward=-1.0) == [-0.5, -1.0]


def test_the_penalty_grows_over_the_last_tokens() -> None:
    """DAPO's eq. 13 with at most eight tokens, of which the last four cost."""
    group = group_of(*(response("stop", 1.0) for _ in range(5)), response("length", 1.0))
    for member, num_tokens in zip(group.responses, (1, 4, 5, 6, 8, 3), strict=True):
        member.token_ids[:] = [1] * num_tokens
    assert rewards_by("score", group, overlong_cache=4) == [1.0, 1.0, 0.75, 0.5, 0.0, 0.0]
    assert rewards_by("zero", group, overlong_cache=4, overlong_penalty=0.5)[-2:] == [0.5, -0.5]
    reward_truncated(group, job(overlong_cache=4, overlong_penalty=2.0).rollout)
    assert [member.reward_parts["overlong"] for member in group.responses] == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("turns", "reward"), [(("stop", "stop"), 1.0), (("length", "stop"), 0.0), (("stop", "length"), 0.0)]
)
def test_an_episode_is_cut_when_any_of_its_turns_is(turns: tuple[str, ...], reward: float) -> None:
    group = group_of(response(turns[-1], 1.0, *turns))
    assert rewards_by("zero", group) == [reward]
    assert rewards_by("score", group, overlong_cache=4) == [1.0]  # the penalty is for responses of one turn


@pytest.mark.parametrize(("rule", "reward_of_cut"), [("score", 0.2), ("zero", 0.0)])
def test_the_push_to_end_is_the_reward_of_ending(rule: Rule, reward_of_cut: float) -> None:
    """All groups of two: the gradient by the logit of ending, with the mean of the group as the baseline."""
    f = 0.5  # probability of an end
    reward_of_end = 0.4  # mean reward of responses that ended: 0.2 of 0.5 are right
    gradient = 0.0
    for outcomes in itertools.product(OUTCOMES, repeat=2):
        rewards = rewards_by(rule, group_of(*(response(*outcome) for outcome in outcomes)))
        baseline = math.fsum(rewards) / 2
        scores = [(reason == "stop") - f for reason, _ in outcomes]
        pushes = [(reward - baseline) * score for reward, score in zip(rewards, scores, strict=True)]
        gradient += math.prod(OUTCOMES[outcome] for outcome in outcomes) * math.fsum(pushes)
    assert gradient == pytest.approx(f * (1 - f) * (reward_of_end - reward_of_cut))


class Filler:
    """A filler whose responses are right and were cut."""

    async def fill(self, flight: Flight, group: RolloutGroup, deadline: float) -> None:
        group.prompt_token_ids.append(1)
        group.responses.extend([response("length", 1.0), response("stop", 1.0)])

    def num_playable(self) -> None:
        return None


@pytest.mark.parametrize(("rule", "rewards"), [("score", [1.0, 1.0]), ("zero", [0.0, 1.0])])
async def test_a_rollout_submits_the_rewards_of_its_job(rule: Rule, rewards: list[float]) -> None:
    limits = job(truncated=rule).rollout
    producer = GroupProducer(Filler(), PromptDecoder(tokenizer_of(None)), BusyMeter(), limits)
    group = await producer.produce(flight_of())
    assert [response.reward for response in group.responses] == rewards


async def test_the_penalty_is_that_of_the_limit_of_the_source() -> None:
    """One token of at most two; the job allows eight."""
    limits = job(overlong_cache=2).rollout
    producer = GroupProducer(Filler(), PromptDecoder(tokenizer_of(None)), BusyMeter(), limits)
    flight = flight_of()
    rewards = []
    for limit in (2, 8):
        flight.claim.task.max_response_tokens = limit
        rewards.append([response.reward for response in (await producer.produce(flight)).responses])
    assert rewards == [[0.0, 0.5], [0.0, 1.0]]


def job(reward: Any = None, **rollout: Any) -> JobConfig:
    body = job_body()
    return JobConfig.model_validate(
        body | {"rollout": body["rollout"] | rollout} | ({"reward": reward} if reward else {})
    )


def test_zero_is_refused_where_a_reward_can_be_negative() -> None:
    length = {"name": "regex", "options": {"pattern": "x"}, "weight": -0.1, "part": "long"}
    several = [{"name": "exact"}, length]
    assert job(several).rollout.truncated == "score"
    assert job([{"name": "exact"}, length | {"weight": 0.1}], truncated="zero").rollout.truncated == "zero"
    with pytest.raises(ValidationError, match=r"rollout.truncated: zero pays .* the weight of reward long is"):
        job(several, truncated="zero")
    assert job(several, truncated="zero", truncated_reward=-0.1).rollout.truncated_reward == -0.1


def test_a_rule_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"rollout.truncated\n *Input should be 'score', 'zero' or 'mask'.*drop"):
        job(truncated="drop")


NAMED = [{"name": "exact"}, {"name": "regex", "options": {"pattern": "x"}, "part": "overlong"}]
FILE = {"type": "jsonl", "path": "prompts.jsonl"}
SHORT = {"data": [FILE | {"name": "a"}, FILE | {"name": "b", "max_response_tokens": 3}]}
KL_IN_REWARD = {"type": "grpo", "kl": {"coef": 0.1, "placement": "reward"}}


@pytest.mark.parametrize(
    ("sections", "rollout", "sentence"),
    [
        ({}, {"truncated_reward": -1.0}, r"truncated_reward: -1 has no effect with truncated = 'score'; use"),
        ({"objective": {"type": "online_dpo"}}, {"truncated": "mask"}, "mask takes responses .* objective online_dpo"),
        ({"objective": KL_IN_REWARD}, {"truncated": "mask"}, "mask takes responses .* a KL term in the reward needs"),
        ({"reward": None, "environment": {"name": "game"}}, {"overlong_cache": 4}, "overlong_cache: an episode has"),
        ({}, {"overlong_cache": 9}, "overlong_cache: 9 tokens are more than a response may have; lower it"),
        (
            SHORT,
            {"overlong_cache": 4},
            r"4 tokens are more than .*; lower it to data.1.max_response_tokens, which is 3",
        ),
        ({}, {"overlong_penalty": 0.5}, "overlong_penalty: 0.5 has no effect without overlong_cache; set"),
        ({"reward": NAMED}, {"overlong_cache": 4}, "reward.part: overlong is the part of the penalty"),
    ],
)
def test_rules_that_cannot_be_are_refused(sections: Any, rollout: Any, sentence: str) -> None:
    body = job_body(**sections)
    with pytest.raises(ValidationError, match=sentence) as caught:
        JobConfig.model_validate(body | {"rollout": body["rollout"] | rollout})
    (error,) = caught.value.errors()
    assert "\n" not in error["msg"]
