"""Advantages in a commit: each response has the one that it was trained with, of every objective, by hand."""

import pytest
import torch

from onbeat.objectives.grpo import GrpoObjective
from onbeat.streams.codec import GroupFailure
from services.trainer import stats as stats_module
from services.trainer.stats import IterationStats
from tests.trainer_fixtures import job_config, rewarded_iteration, train
from tests.unit.objectives.test_every_objective import KINDS, advantages

REWARDS = {"0-0": [0.0, 1.0, 0.25], "0-1": [1.0, 1.0, 0.0], "0-2": [0.5, 0.5, 0.5], "0-3": [-2.0, 3.0, 1.0]}


def published(tmp_path, rewards=REWARDS, objective=None, **sections):
    schedule = {"mode": "sync", "num_iterations": 1}
    config = job_config(objective={"type": "grpo"} | (objective or {}), schedule=schedule, **sections)
    (shown,) = train(config, rewarded_iteration(0, rewards.values()), tmp_path, arrivals=4).job.advantages
    return shown


def by_hand(kind, rewards):
    return pytest.approx(advantages(kind, rewards, list(REWARDS.values())), abs=1.01e-4)


@pytest.mark.parametrize(
    "training",
    [{}, {"max_tokens_per_micro_batch": 1}, {"num_updates_per_iteration": 2}],
    ids=["", "groups split over rows", "several updates"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_advantages_are_the_objectives_and_zero_where_untrained(kind, training, tmp_path):
    shown = published(tmp_path, objective={"type": kind}, training=training)
    assert shown == {group_id: by_hand(kind, rewards) for group_id, rewards in REWARDS.items()}
    assert shown["0-2"] == [0.0, 0.0, 0.0]


def test_penalty_in_the_reward_is_part_of_the_advantage(tmp_path, monkeypatch):
    penalised = []

    def record(*args, call=GrpoObjective.loss):
        loss = call(*args)
        penalised.append(loss.advantages)
        return loss

    monkeypatch.setattr(GrpoObjective, "loss", record)
    kl = {"coef": 5.0, "placement": "reward"}
    schedule = {"mode": "sync", "num_iterations": 2}
    config = job_config(objective={"type": "grpo", "kl": kl}, schedule=schedule)
    groups = [group for iteration in range(2) for group in rewarded_iteration(iteration, REWARDS.values())]
    shown = train(config, groups, tmp_path, arrivals=4).job.advantages[1]  # the policy has left the reference
    flat = [advantage for group_id in REWARDS for advantage in shown[group_id.replace("0-", "1-")]]
    used = torch.cat(penalised)[-len(flat) :]
    assert flat == pytest.approx(used.tolist(), abs=1e-4)
    assert shown["1-0"] != by_hand("grpo", REWARDS["0-0"])
    assert any(shown["1-2"])  # equal rewards, unequal penalties


def test_update_without_signal_publishes_zeros_and_pairs_nothing(tmp_path):
    uniform = {group_id: [1.0, 1.0, 1.0] for group_id in REWARDS}
    assert published(tmp_path / "uniform", uniform) == {group_id: [0.0, 0.0, 0.0] for group_id in REWARDS}
    assert published(tmp_path / "pairs", objective={"type": "online_dpo"}) == {}


def test_failed_group_is_left_out(tmp_path):
    groups = rewarded_iteration(0, REWARDS.values())
    del groups[1].responses[:]
    groups[1].failure.CopyFrom(GroupFailure(kind="reward_failed", message="it raised"))
    schedule = {"mode": "sync", "num_iterations": 1}
    _, job = train(job_config(schedule=schedule), groups, tmp_path, arrivals=4)
    assert job.advantages[0].keys() == REWARDS.keys() - {"0-1"}


def test_replicas_publish_theirs_together(tmp_path):
    first, second = IterationStats(0), IterationStats(0)
    first.advantages, second.advantages = {"0-0": [0.5, None]}, {"0-1": [-0.5, 0.5]}
    messages = [first.to_bytes(), second.to_bytes()]
    for replica in (first, second):
        replica.merge(messages)
        assert replica.shown_advantages() == {"0-0": [0.5, None], "0-1": [-0.5, 0.5]}


def test_nothing_is_published_of_a_huge_iteration(tmp_path, monkeypatch):
    monkeypatch.setattr(stats_module, "MAX_SHOWN", 12)
    assert len(published(tmp_path / "all")) == 4
    monkeypatch.setattr(stats_module, "MAX_SHOWN", 11)
    assert published(tmp_path / "none") == {}
