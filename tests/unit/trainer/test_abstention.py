"""Responses without a reward: the update is the one of a job in which they had never been sampled."""

import copy
import math
import statistics

import pytest
import torch

from onbeat.objectives.base import Logprobs
from onbeat.streams.codec import decode_group, do_rewards_differ, encode_group, given_rewards
from services.trainer.batch import cost, group_rewards, pack
from services.trainer.model.model import response_logprobs
from services.trainer.stats import IterationStats
from tests.trainer_fixtures import (
    REWARDED,
    gap,
    job_config,
    make_group,
    model_of,
    pass_rows,
    set_rollout_logprobs,
    train,
)

KINDS = REWARDED
WITH_ADVANTAGES = [kind for kind in KINDS if kind != "online_dpo"]
EXTRAS = {
    "plain": {},
    "kl in the loss": {"kl": {"coef": 0.3}},
    "kl in the reward": {"kl": {"coef": 0.3, "placement": "reward"}},
    "band": {"importance": {"type": "band", "low": 0.8, "high": 1.2}},
}
CASES = [
    (kind, extra)
    for kind in KINDS
    for extra in EXTRAS
    if (kind, extra) != ("reinforce_pp", "kl in the reward") and (kind != "online_dpo" or extra == "plain")
]
REWARDS = [[1.0, None, 0.25], [None, 0.5, 0.0], [1.0, 0.0, None], [None, None, None]]
LITTLE = [[None, None, None], [1.0, None, None], [None, 0.5, 0.5]]  # nothing to compare


def config_of(kind, extra="plain", **sections):
    schedule = {"mode": "sync", "num_iterations": 1}
    return job_config(objective={"type": kind} | EXTRAS[extra], schedule=schedule, **sections)


def group_of(index, rewards, iteration=0):
    lengths = [3 + index, 1, 4, 2][: len(rewards)]
    group = make_group(f"{iteration}-{index}", 4, lengths, iteration, rewards=[reward or 0.0 for reward in rewards])
    for response, reward in zip(group.responses, rewards, strict=True):
        response.has_no_reward = reward is None
    return group


def groups_of(rewards):
    return [group_of(index, row) for index, row in enumerate(rewards)]


def without_abstentions(groups):
    """Return the groups as if the responses without a reward had not been sampled."""
    kept = copy.deepcopy(groups)
    for group in kept:
        responses = [response for response in group.responses if not response.has_no_reward]
        del group.responses[:]
        group.responses.extend(responses)
    return [group for group in kept if group.responses]


def update_of(config, models, groups):
    """Return the gradient of each parameter, and what it is divided by."""
    stats = IterationStats(0)
    given = [torch.tensor(rewards) for group in groups if (rewards := given_rewards(group))]
    scale = config.objective.iteration_scale(given)
    trained = [group for group in groups if config.objective.has_signal(group_rewards(group))]
    for group in groups:
        stats.add_group(group, group in trained)
    for batch, logprobs, loss, entropy in pass_rows(config, models, trained, scale):
        stats.add_loss(batch, logprobs.trainer, None, loss, entropy)
    tally = stats.tally
    counts = (tally.num_tokens - tally.num_rejected_tokens, tally.num_responses, tally.num_pairs)
    divisor = config.objective.denominator(*counts, config.rollout.max_response_tokens)
    return {name: p.grad.clone() for name, p in models[0].named_parameters() if p.grad is not None}, divisor


@pytest.mark.parametrize("budget", [4096, 20])
@pytest.mark.parametrize(("kind", "extra"), CASES)
def test_update_is_that_of_the_rewarded_responses(kind, extra, budget, models):
    config = config_of(kind, extra, training={"max_tokens_per_micro_batch": budget})
    groups = groups_of(REWARDS)
    logprobs, _ = response_logprobs(models[1], pack(groups, torch.device("cpu")), 1.0)
    set_rollout_logprobs(groups, logprobs + torch.linspace(-0.4, 0.4, len(logprobs)))  # some within the band
    expected, expected_divisor = update_of(config, models, without_abstentions(groups))
    gradients, divisor = update_of(config, models, groups)
    assert divisor == expected_divisor
    assert max(gradient.abs().max().item() for gradient in expected.values()) > 1e-3
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected.items())


def advantages_by_loop(kind, rewards):
    """Return the advantages by the papers' formulas, 0 for responses without a reward."""
    given = [reward for reward in rewards if reward is not None]
    if len(set(given)) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(given)
    if kind == "rloo":
        of_one = {reward: reward - (sum(given) - reward) / (len(given) - 1) for reward in given}
    else:
        scale = statistics.stdev(given) + 1e-4 if kind in ("grpo", "dapo", "gspo", "cispo") else 1.0
        of_one = {reward: (reward - mean) / scale for reward in given}
    return [0.0 if reward is None else of_one[reward] for reward in rewards]


@pytest.mark.parametrize("kind", WITH_ADVANTAGES)
@pytest.mark.parametrize("rewards", [*REWARDS, *LITTLE, [0.3, 0.9, None, 0.1]], ids=str)
def test_advantages_equal_the_plain_loop(kind, rewards):
    batch = pack([group_of(0, rewards)], torch.device("cpu"))
    logprobs = torch.zeros(len(batch.target_ids), dtype=torch.float64)
    advantages = config_of(kind).objective.loss(batch, Logprobs(logprobs, logprobs, None)).advantages.tolist()
    assert advantages == pytest.approx(advantages_by_loop(kind, rewards), rel=1e-5)
    assert [value == 0.0 for value, reward in zip(advantages, rewards, strict=True) if reward is None] == (
        [True] * rewards.count(None)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_fewer_than_two_opinions_have_no_signal(kind):
    config = config_of(kind)
    for group in groups_of(LITTLE):
        assert not config.objective.has_signal(group_rewards(group))
        assert not do_rewards_differ(group)
        assert cost(group, config) == 0
    assert all(do_rewards_differ(group) for group in groups_of(REWARDS[:3]))


def test_kl_term_has_no_pass_for_a_group_without_rewards():
    objective = config_of("grpo", "kl in the loss").objective
    assert [objective.has_signal(group_rewards(group)) for group in groups_of(LITTLE)] == [False, True, True]
    assert objective.trained_members(group_rewards(group_of(0, LITTLE[1]))) == (0,)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_pp"])
def test_job_with_abstentions_replays_from_its_record(kind, tmp_path):
    config, groups = config_of(kind), groups_of(REWARDS)
    first, job = train(config, groups, tmp_path / "first")
    assert gap(first, model_of(config)).max() > 1e-3
    recorded = [decode_group(encode_group(group)) for group in groups]
    again, repeated = train(config, recorded[::-1], tmp_path / "again", micro_batches=job.recorded)
    assert repeated.version_digests == job.version_digests
    assert gap(first, again).max() == 0.0
    (metrics,) = job.reports
    given = [reward for row in REWARDS for reward in row if reward is not None]
    assert metrics["reward_mean"] == pytest.approx(statistics.fmean(given))
    assert metrics["reward_std"] == pytest.approx(statistics.pstdev(given))
    assert (metrics["num_responses"], metrics["rollout/responses_without_reward"]) == (12, 6)
    assert metrics["rollout/uniform_groups"] == 1
    assert metrics["rollout/solved_none_frac"] == pytest.approx(1 / 3)  # one of three groups with a reward
    (advantages,) = job.advantages
    assert [value is None for value in advantages["0-1"]] == [True, False, False]
    assert advantages["0-3"] == [None] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_iteration_without_any_reward_moves_nothing(kind, tmp_path):
    config = config_of(kind)
    trained, job = train(config, groups_of([[None] * 3] * 4), tmp_path)
    assert gap(trained, model_of(config)).max() == 0.0
    (metrics,) = job.reports
    assert not {"reward_mean", "reward_std", "rollout/solved_all_frac"} & metrics.keys()
    assert metrics["rollout/responses_without_reward"] == 12
    assert "mismatch_mean" in metrics


def test_a_penalty_that_is_no_number_stays_an_error():
    config = config_of("grpo", "kl in the reward")
    batch = pack([group_of(0, [1.0, 0.5, None])], torch.device("cpu"))
    logprobs = torch.zeros(len(batch.target_ids), dtype=torch.float64)
    loss = config.objective.loss(batch, Logprobs(logprobs, logprobs, logprobs + math.nan))
    assert not torch.isfinite(loss.loss_sum)
