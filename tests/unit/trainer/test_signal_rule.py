"""`objective.signal`: what makes a group teach. Every other group is one of equal rewards, to the bit."""

import pytest
import torch

from onbeat.config import JobConfig
from onbeat.objectives import BUILT_IN, INSTALLED
from onbeat.streams.codec import GroupFailure, Response, RolloutGroup
from onbeat.streams.signal import Signal
from services.trainer.batch import compared, cost, does_count
from services.trainer.stats import IterationStats
from tests.trainer_fixtures import REWARDED, job_config, make_group, open_update, train

RIGHT = Signal("part:right")
REWARDS = [{"name": "exact", "part": "right"}, {"name": "regex", "options": {"pattern": "x"}, "part": "short"}]
PARTS = [  # right and short of each response, by group
    ([0.0, 0.0, 0.0], [0.3, 0.1, 0.7]),
    ([1.0, 0.0, 0.0], [0.2, 0.5, 0.1]),
    ([1.0, 1.0, 1.0], [0.4, 0.4, 0.1]),
    ([0.0, 1.0, 1.0], [0.6, 0.6, 0.6]),
]
HAS_SIGNAL = [False, True, False, True]
KINDS = sorted(REWARDED)
EXTRAS = {"": {}, "kl": {"kl": {"coef": 0.1}}, "band": {"importance": {"type": "band", "low": 1e-6, "high": 1e6}}}


def config_of(signal, kind="grpo", objective=None, **sections):
    job = job_config(objective={"type": kind, **(objective or {})}, **sections).model_dump(mode="json")
    job |= {"reward": REWARDS, "solved_at": 1.0}
    job["objective"]["signal"] = signal
    return JobConfig.model_validate(job)


def groups_of(iteration=0):
    groups = []
    for index, (right, short) in enumerate(PARTS):
        totals = [a + 0.1 * b for a, b in zip(right, short, strict=True)]
        group = make_group(f"{iteration}-{index}", 4, (2, 3, 4), iteration, rewards=totals)
        for response, a, b in zip(group.responses, right, short, strict=True):
            response.reward_parts.update({"right": a, "short": b})
        groups.append(group)
    return groups


def responses_of(*parts, rewards=(0.0, 0.5, 1.0)):
    return RolloutGroup(
        responses=[Response(reward=reward, reward_parts=part) for reward, part in zip(rewards, parts, strict=True)]
    )


def test_solved_is_by_the_limit_of_the_source():
    config = with_sources(config_of("solved"), {}, {"solved_at": 0.4})
    group = responses_of({}, {}, rewards=(0.2, 0.5))
    for signal in (Signal.of(config), Signal.of_record(config.model_dump(mode="json"))):
        shown = []
        for group.source in ("easy", "hard"):
            shown.append(signal.is_in(group))
        assert shown == [False, True]


def with_sources(job, *sections):
    data = [{"type": "jsonl", "path": "a.jsonl", "name": name} for name in ("easy", "hard")]
    joined = [source | section for source, section in zip(data, sections, strict=True)]
    return JobConfig.model_validate(job.model_dump(mode="json") | {"data": joined})


@pytest.mark.parametrize(
    ("of_job", "of_hard", "shown"),
    [("reward", "part:right", [True, False]), ("part:right", "reward", [False, True])],
)
def test_a_source_may_have_its_own_signal(of_job, of_hard, shown):
    config = with_sources(config_of(of_job, rollout={"max_prompts_per_iteration": 8}), {}, {"signal": of_hard})
    group = groups_of()[0]  # only `short` differs
    for signal in (Signal.of(config), Signal.of_record(config.model_dump(mode="json"))):
        judged = []
        for group.source in ("easy", "hard"):
            judged.append(signal.is_in(group))
            assert does_count(group, config) is (cost(group, config) > 0) is judged[-1]
            assert bool(compared(group, config).any()) is judged[-1]
        assert judged == shown
        assert signal.words == "no signal (by the rule of their source)"
    assert signal.words_of("hard" if of_job == "reward" else "easy") in (
        "no signal (data.signal = part:right)",
        "no signal (objective.signal = part:right)",
    )


def test_update_with_signals_of_sources_is_that_of_equal_rewards(tmp_path):
    plain = config_of("reward", schedule={"mode": "sync", "num_iterations": 1})
    config = with_sources(plain, {}, {"signal": "part:right"})
    groups, expected = groups_of(), groups_of()
    for group, source in zip([*groups, *expected], ["easy", "easy", "hard", "hard"] * 2, strict=True):
        group.source = source
    for response in expected[2].responses:  # only `short` differs, which is no signal in this source
        response.reward = 0.0
    taught = train(config, groups, tmp_path / "a", arrivals=4)
    equal = train(plain, expected, tmp_path / "b", arrivals=4)
    by_reward = train(plain, groups, tmp_path / "c", arrivals=4)
    assert taught.job.version_digests == equal.job.version_digests != by_reward.job.version_digests
    (metrics,) = taught.job.reports
    assert (metrics["source/easy/uniform_groups"], metrics["source/hard/uniform_groups"]) == (0, 1)


def test_parts_of_a_source_are_those_of_its_rewards():
    rewards = [{"name": "exact", "part": part} for part in ("mine", "too")]
    data = [{"type": "jsonl", "path": "a.jsonl", "name": name} for name in ("easy", "hard")]
    job = config_of("reward").model_dump(mode="json") | {"data": [data[0], data[1] | {"reward": rewards}]}
    job["objective"]["advantages_from"] = "parts"
    config = JobConfig.model_validate(job)
    group = responses_of({"right": 0.0, "mine": 1.0}, {"right": 1.0, "mine": 0.0}, rewards=(0.0, 1.0))
    advantages = []
    for group.source in ("easy", "hard"):
        advantages.append(compared(group, config).tolist())
    assert advantages[0][0] < 0 < advantages[1][0]


@pytest.mark.parametrize(
    ("parts", "has_signal"),
    [
        (({"right": 1}, {"right": 1}, {"right": 0}), True),
        (({"right": 1}, {"right": 1}, {"right": 1}), False),
        (({"right": 1}, {"right": 1 + 1e-12}, {"right": 1}), False),  # the same in float32
        (({"right": 1}, {"right": 1 + 1e-6}, {"right": 1}), True),
        (({"right": 1}, {}, {"right": 1}), False),
        (({"right": 1}, {}, {"right": 0}), True),
        (({"right": 1}, {}, {"short": 0}), False),
        (({"right": 1}, {"right": float("nan")}, {"right": 1}), False),
    ],
)
def test_a_part_is_compared_before_its_weight_in_float32(parts, has_signal):
    assert RIGHT.is_in(responses_of(*parts)) is has_signal


@pytest.mark.parametrize(
    ("rewards", "has_signal"),
    [((0.0, 0.4, 0.9), False), ((1.0, 1.5, 2.0), False), ((0.9, 1.0, 0.9), True), ((0.9, 1 - 1e-9, 0.9), True)],
)
def test_solved_compares_rewards_with_solved_at(rewards, has_signal):
    assert Signal("solved", 1.0).is_in(responses_of({}, {}, {}, rewards=rewards)) is has_signal


@pytest.mark.parametrize("rule", ["reward", "solved", "part:right"])
def test_a_failed_group_has_no_signal(rule):
    assert not Signal(rule).is_in(RolloutGroup(failure=GroupFailure(kind="reward_failed")))


def test_signal_of_an_older_record_is_the_reward(monkeypatch):
    assert Signal.of_record({"objective": {"type": "grpo"}}) == Signal()
    assert Signal.of_record({"objective": {"type": "own", "signal": 0.5}, "solved_at": 2.0}) == Signal("reward", 2.0)
    monkeypatch.setitem(INSTALLED, "own", BUILT_IN["distill"])  # as a class of a package that needs no reward
    assert Signal.of_record({"objective": {"type": "own"}}).rule == "teacher"
    recorded = {"objective": {"signal": "part:right"}, "solved_at": 0.5}
    assert Signal.of_record(recorded) == Signal("part:right", 0.5)


def test_passes_divisor_and_rewards_follow_one_rule():
    config, groups = config_of("part:right", rollout={"max_prompts_per_iteration": 8}), groups_of()
    assert [Signal.of(config).is_in(group) for group in groups] == HAS_SIGNAL
    assert [does_count(group, config) for group in groups] == HAS_SIGNAL
    assert [cost(group, config) > 0 for group in groups] == HAS_SIGNAL
    keeping = config_of("part:right")
    assert all(does_count(group, keeping) for group in groups)
    assert [bool(compared(group, keeping).any()) for group in groups] == HAS_SIGNAL


@pytest.mark.parametrize("kind", [kind for kind in KINDS if BUILT_IN[kind].has_advantages])
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_advantages_without_signal_are_exactly_zero(kind, extra):
    config = config_of("part:right", kind, extra, schedule={"mode": "sync"})
    gradient, _, stats = open_update(config)
    gradient.add(groups_of())
    for group, has_signal in zip(groups_of(), HAS_SIGNAL, strict=True):
        rewards = torch.tensor([response.reward for response in group.responses])
        expected = config.objective.advantages(rewards).tolist() if has_signal else [0.0] * 3  # the plain rule
        assert stats.advantages[group.group_id] == [round(value, 4) + 0.0 for value in expected]


def with_equal_rewards(groups):
    """Return the groups with rewards of 0 where they have no signal: the plain statement of the rule."""
    for group, has_signal in zip(groups, HAS_SIGNAL, strict=True):
        for response in group.responses:
            response.reward *= has_signal
    return groups


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("kind", KINDS)
def test_update_is_that_of_equal_rewards_to_the_bit(kind, extra, tmp_path):
    if kind == "online_dpo" and extra:
        return
    schedule = {"mode": "sync", "num_iterations": 1}
    taught = train(config_of("part:right", kind, extra, schedule=schedule), groups_of(), tmp_path / "a", arrivals=4)
    plain = config_of("reward", kind, extra, schedule=schedule)
    expected = train(plain, with_equal_rewards(groups_of()), tmp_path / "b", arrivals=4)
    by_reward = train(plain, groups_of(), tmp_path / "c", arrivals=4)
    assert taught.job.version_digests == expected.job.version_digests
    assert taught.job.version_digests != by_reward.job.version_digests
    (metrics,) = taught.job.reports
    assert metrics["rollout/uniform_groups"] == 2
    assert metrics["train/skipped_groups"] == (0 if plain.objective.has_signal(torch.zeros(3)) else 2)
    assert metrics["reward_mean"] == pytest.approx(sum(sum(a) + 0.1 * sum(b) for a, b in PARTS) / 12)


def test_recorded_job_is_repeated_to_the_bit(tmp_path):
    config, groups = config_of("solved", schedule={"num_iterations": 1}), groups_of()
    first = train(config, groups, tmp_path / "first")
    again = train(config, groups[::-1], tmp_path / "again", arrivals=9, micro_batches=first.job.recorded)
    assert again.job.version_digests == first.job.version_digests


def test_unsolved_groups_are_counted_with_their_parts(tmp_path):
    (metrics,) = train(config_of("reward", schedule={"num_iterations": 1}), groups_of(), tmp_path).job.reports
    assert metrics["rollout/mixed_unsolved_groups"] == 1
    assert metrics["rollout/mixed_unsolved_short"] == 1
    assert "rollout/mixed_unsolved_right" not in metrics


def test_unsolved_groups_of_another_rule_are_not_counted():
    """The source easy teaches by one part, so that its rewards say nothing."""
    signal = Signal.of(with_sources(config_of("reward"), {"signal": "part:right"}, {}))
    stats = IterationStats(policy_version=0, signal=signal)
    for group, source in zip((groups_of(0)[0], groups_of(1)[0]), ("easy", "hard"), strict=True):
        group.source = source
        stats.add_group(group, is_trained=True)
    assert stats.sums["rollout/mixed_unsolved_groups"] == stats.sums["unsolved/short"] == 1
