"""Dynamic sampling in the trainer: groups with equal rewards are replaced, and the update is that of the others."""

import pytest
import torch

from onbeat.objectives import BUILT_IN
from onbeat.streams.codec import GroupFailure, RolloutGroup, do_rewards_differ
from services.trainer.feed import GroupFeed
from services.trainer.stats import Tally
from tests.trainer_fixtures import REWARDED, RecordedJob, gap, job_config, make_group, model_of, open_update, train

NUM_PROMPTS = 4
REWARDS = [[0.0, 1.0, 0.5], [1.0, 1.0, 1.0], [0.2, 0.9, 0.1], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], None, [0.3, 0.3, 0.7]]


class ReplacingJob(RecordedJob):
    """Dispatches the next group when one that does not count has been accepted, as the ledger does."""

    def dispatched(self, iteration):
        of_iteration = sorted((group for group in self._groups if group.iteration == iteration), key=index_of)
        taken = super().taken(iteration)
        accepted = [group for group in of_iteration if group not in self._waiting or group.group_id in taken]
        num_replaced = sum(not do_rewards_differ(group) for group in accepted)
        return {group.group_id for group in of_iteration[: NUM_PROMPTS + num_replaced]}

    def taken(self, iteration):
        return super().taken(iteration) | {name for batch in self.recorded.get(iteration, []) for name in batch}

    def take(self, count, timeout_s):
        """Hand out none that is not dispatched yet."""
        waiting = self._waiting
        known = set().union(*(self.dispatched(group.iteration) for group in waiting))
        self._waiting = [group for group in waiting if group.group_id in known]
        later = [group for group in waiting if group.group_id not in known]
        taken = super().take(count, timeout_s)
        self._waiting += later
        return taken


def index_of(group):
    return int(group.group_id.partition("-")[2])


def groups_of(iteration, rewards=REWARDS):
    """Build a group for each entry; None stands for a failed one."""
    groups = []
    for index, group_rewards in enumerate(rewards):
        group = make_group(
            f"{iteration}-{index}", 3 + index, (3, 1 + index, 4), version=iteration, rewards=group_rewards
        )
        if group_rewards is None:
            failure = GroupFailure(kind="reward_failed", message="it raised")
            group = RolloutGroup(group_id=group.group_id, iteration=iteration, failure=failure)
        groups.append(group)
    return groups


def config_of(objective=None, mode="periodic", num_iterations=2, **rollout):
    return job_config(
        objective=objective or {"type": "dapo"},
        rollout={"max_prompts_per_iteration": 8} | rollout,
        schedule={"mode": mode, "num_iterations": num_iterations},
    )


def train_replacing(config, groups, folder, **options):
    return train(config, groups, folder, job=ReplacingJob(config, groups, **options))


@pytest.mark.parametrize("kl", [{"coef": 0.0}, {"coef": 0.1}], ids=["", "kl"])
@pytest.mark.parametrize("kind", [kind for kind in REWARDED if "periodic" in BUILT_IN[kind].modes])
def test_update_is_that_of_the_groups_that_count(kind, kl, tmp_path):
    def renumbered(groups):
        """Return the groups that count, numbered as those of a job without dynamic sampling."""
        counting = [group for group in groups if do_rewards_differ(group)]
        for index, group in enumerate(counting):
            group.group_id = f"{group.iteration}-{index % NUM_PROMPTS}"
        return counting

    if kind == "online_dpo" and kl["coef"]:
        return
    objective = {"type": kind, "kl": kl}
    dynamic, plain = config_of(objective), config_of(objective, max_prompts_per_iteration=None)
    trained, job = train_replacing(dynamic, [*groups_of(0), *groups_of(1)], tmp_path / "a", arrivals=7, is_steady=True)
    expected, _ = train(plain, renumbered([*groups_of(0), *groups_of(1)]), tmp_path / "b", arrivals=4)
    assert gap(model_of(plain), expected).max() > 1e-3
    assert gap(trained, expected).mean() < 1e-6
    assert gap(trained, expected).max() < 1e-3
    for metrics in job.reports:
        assert metrics["rollout/uniform_groups"] == 2
        assert metrics["num_responses"] == 18  # the reward's curve is of all


def test_periodic_equals_sync_with_dynamic_sampling(tmp_path):
    groups = [*groups_of(0), *groups_of(1)]
    expected, _ = train_replacing(config_of(mode="sync"), groups, tmp_path / "sync", arrivals=14)
    backwards = sorted(groups, key=lambda group: (group.iteration, -index_of(group)))
    trained, job = train_replacing(config_of(), backwards, tmp_path / "periodic")
    assert {group_id for batch in job.recorded[1] for group_id in batch} == {f"1-{index}" for index in range(7)}
    assert gap(trained, expected).max() < 1e-3


def test_replacing_groups_do_not_wait_for_a_slow_one():
    class SlowFirstGroup(ReplacingJob):
        def take(self, count, timeout_s):
            self._waiting.sort(key=lambda group: group.group_id == "0-0")
            return super().take(count, timeout_s)

    config = config_of(num_iterations=1)
    job = SlowFirstGroup(config, groups_of(0))
    list(GroupFeed(job, config).micro_batches(0, ["0-0", "0-1", "0-2", "0-3"]))
    trained = [group_id for batch in job.recorded[0] for group_id in batch]
    assert trained == [f"0-{index}" for index in (1, 2, 3, 4, 5, 6, 0)]


def test_recorded_micro_batches_are_repeated(tmp_path):
    groups, config = groups_of(0), config_of(num_iterations=1)
    first, job = train_replacing(config, groups, tmp_path / "first")
    again, repeated = train_replacing(config, groups[::-1], tmp_path / "again", arrivals=9, micro_batches=job.recorded)
    assert len(job.recorded[0]) > 1
    assert repeated.recorded == {}
    assert gap(first, again).max() == 0.0


def test_an_iteration_without_a_group_that_counts_moves_nothing(tmp_path):
    config = config_of({"type": "grpo", "kl": {"coef": 0.1}}, num_iterations=1)
    groups = groups_of(0, [[1.0] * 3] * 8)
    trained, job = train_replacing(config, groups, tmp_path)
    assert torch.equal(gap(trained, model_of(config)), torch.zeros_like(gap(trained, trained)))
    (metrics,) = job.reports
    assert (metrics["train/grad_norm"], metrics["rollout/uniform_groups"]) == (0.0, 8)
    assert "mismatch_mean" in metrics


def test_replica_without_a_group_that_counts_adds_nothing():
    """It passes a row for the mismatch. What the band rejects of it would be missing in the divisor of all replicas."""
    band = {"type": "band", "low": 0.999, "high": 1.001}
    gradient, _, stats = open_update(config_of({"type": "dapo", "importance": band}, num_iterations=1))
    gradient.add(groups_of(0)[1:2])
    gradient.complete()
    assert stats.sums["token/rejected_frac"] > 0
    assert stats.tally == Tally(num_arrived=3)


def test_replicas_together_get_the_groups_that_replace_others():
    """Two replicas take from one job; each micro-batch is granted to one of them."""
    config = config_of(num_iterations=1)
    job = ReplacingJob(config, groups_of(0), is_steady=True)
    replicas = [GroupFeed(job, config, num_replicas=2).micro_batches(0, ["0-0", "0-1", "0-2", "0-3"]) for _ in "ab"]
    while replicas:
        for replica in list(replicas):
            if next(replica, None) is None:
                replicas.remove(replica)
    assert sorted(group_id for batch in job.recorded[0] for group_id in batch) == [f"0-{index}" for index in range(7)]
