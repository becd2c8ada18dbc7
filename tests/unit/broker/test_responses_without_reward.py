"""Responses without a reward, as the broker shows them: not in scores of held-out sets, and neither right nor wrong."""

import pytest

from onbeat.streams.codec import Response, RolloutGroup
from onbeat.streams.signal import Signal
from services.broker.evaluations import score
from services.broker.samples import Choice, sample_groups
from services.broker.views.spans import accepted_group


def group_of(place: int, *rewards: float | None) -> RolloutGroup:
    responses = [
        Response(token_ids=[1], reward=reward or 0.0, has_no_reward=reward is None, finish_reason="stop")
        for reward in rewards
    ]
    return RolloutGroup(group_id=f"0-{place}", responses=responses)


GROUPS = [group_of(0, 1.0, None), group_of(1, 0.0, 0.0), group_of(2, None, None)]


def test_scores_of_a_held_out_set_leave_them_out():
    scores = score(GROUPS)
    assert (scores["reward_mean"], scores["pass_at_k"]) == (pytest.approx(1 / 3), 0.5)
    assert (scores["solved_all_frac"], scores["solved_none_frac"]) == (0.5, 0.5)
    assert score(GROUPS[2:]) == {}
    assert "pass_at_k" not in score([group_of(0, 1.0, None), group_of(1, None, 0.0)])  # one reward for each prompt


def test_samples_show_them_unless_rewards_are_chosen():
    assert [sample.reward for sample in sample_groups(GROUPS, 10)] == [1.0, 0.0, None, None, 0.0, None]
    for choice in (Choice(least=-1.0), Choice(most=1.0), Choice(is_solved=False), Choice(is_solved=True)):
        assert None not in [sample.reward for sample in sample_groups(GROUPS, 10, choice=choice)]


def test_mean_of_a_group_leaves_them_out():
    shown = [accepted_group("1-1", group, Signal()) for group in GROUPS]
    assert [(group.num_responses, group.reward_mean) for group in shown] == [(2, 1.0), (2, 0.0), (2, None)]
