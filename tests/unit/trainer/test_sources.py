"""The curves of several sources."""

import pytest

from onbeat.contracts.response_stats import ResponseStats
from onbeat.streams.codec import GroupFailure, Response, RolloutGroup
from services.trainer.stats import IterationStats


def group(number: int, source: str, *rewards: float) -> RolloutGroup:
    responses = [Response(token_ids=[1], reward=reward, finish_reason="stop") for reward in rewards]
    for response in responses:
        response.version_spans.add(policy_version=0, start=0, end=1)
    failure = None if rewards else GroupFailure(kind="reward_failed", message="it raised")
    return RolloutGroup(group_id=f"0-{number}", source=source, responses=responses, failure=failure)


GROUPS = [group(0, "easy", 2, 2), group(1, "hard", 0, 2), group(2, "easy", 2, 0, 0, 0), group(3, "gone")]
CURVES = {
    "source/easy/groups": 2,
    "source/easy/uniform_groups": 1,
    "source/easy/reward_mean": 1,
    "source/easy/solved_frac": 0.5,
    "source/gone/groups": 1,
    "source/gone/uniform_groups": 0,
    "source/hard/groups": 1,
    "source/hard/uniform_groups": 0,
    "source/hard/reward_mean": 1,
    "source/hard/solved_frac": 0.5,
}


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_sources_have_their_own_curves_over_all_replicas(num_replicas):
    limits = {"solved_at": 9.0, "by_source": {"easy": 2.0, "hard": 2.0}}
    replicas = [IterationStats(0, responses=ResponseStats.model_validate(limits)) for _ in range(num_replicas)]
    for number, item in enumerate(GROUPS):
        replicas[number % num_replicas].add_group(item, is_trained=True)
    replicas[0].merge([replica.to_bytes() for replica in replicas])
    report = replicas[0].report(num_replicas)
    assert {name: value for name, value in sorted(report.items()) if name.startswith("source/")} == CURVES
    assert (report["reward_mean"], report["rollout/solved_all_frac"]) == (1, 1 / 3)


def test_single_source_has_no_curves_of_its_own():
    stats = IterationStats(0)
    stats.add_group(group(0, "", 1, 0), is_trained=True)
    assert not [name for name in stats.report() if name.startswith("source/")]
