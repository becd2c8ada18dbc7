"""Groups without signal are never computed, and the update is the one with them; the algebra decides, per objective."""

import random
from dataclasses import replace

import pytest
import torch

from onbeat.contracts.errors import JobFailed
from onbeat.objectives import BUILT_IN
from onbeat.streams.codec import do_rewards_differ
from services.trainer.batch import cost, group_rewards, pack
from services.trainer.model.model import response_logprobs
from services.trainer.stats import IterationStats
from services.trainer.world import World
from tests.trainer_fixtures import (
    REWARDED,
    RecordedJob,
    job_config,
    make_group,
    open_update,
    pass_rows,
    rewarded_iteration,
    set_rollout_logprobs,
    tiny_model,
    train,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
KINDS = REWARDED
KL = {"kl": {"coef": 0.3}}
TRUNCATED = {"importance": {"type": "truncated", "cap": 1.1}}
BAND = {"importance": {"type": "band", "low": 0.8, "high": 1.2}}
EXTRAS = {
    "plain": {},
    "kl in the loss, k2": {"kl": {"coef": 0.3, "estimator": "k2"}},
    "kl in the loss, k3": KL,
    "kl in the loss, band": KL | BAND,
    "kl in the reward": {"kl": {"coef": 0.3, "placement": "reward"}},
    "kl of no weight": {"kl": {"coef": 0.0, "placement": "reward"}},
    "truncated": TRUNCATED,
    "truncated, proximal": TRUNCATED | {"old_policy": "proximal"},
    **{f"band, {name}": BAND | {"normalization": name} for name in ("token_mean", "sequence_mean", "constant")},
    **{name: {"normalization": name} for name in ("token_mean", "sequence_mean", "sequence_sum", "constant")},
}
CASES = [
    (kind, extra)
    for kind in KINDS
    for extra in EXTRAS
    if (kind, extra) != ("reinforce_pp", "kl of no weight")  # placement = "reward" is refused there
    and (kind, extra) != ("reinforce_pp", "kl in the reward")
    and not (kind == "online_dpo" and extra not in ("plain", "kl of no weight"))  # it has no such keys, or refuses them
]
UNIFORM, MIXED = [[1.0] * 3, [0.1] * 3, [0.0] * 3], [[0.0, 1.0, 0.25], [1.0, 1.0, 0.0]]


def config_of(kind, extra, **sections):
    return job_config(objective={"type": kind} | EXTRAS[extra], schedule={"mode": "bounded"}, **sections)


@pytest.fixture(scope="module")
def groups(models):
    """Build groups with and without signal in turn; rollout logprobs lie on both sides of the old policy's band."""
    rng = random.Random(0)
    rewards = [UNIFORM[0], MIXED[0], UNIFORM[1], MIXED[1], UNIFORM[2]]
    groups_of_rewards = [
        make_group(f"0-{i}", 3 + i, (3, 1 + i, 4), rewards=group_rewards) for i, group_rewards in enumerate(rewards)
    ]
    logprobs, _ = response_logprobs(models[1], pack(groups_of_rewards, CPU), 1.0)
    set_rollout_logprobs(groups_of_rewards, logprobs + torch.tensor([rng.uniform(-0.4, 0.4) for _ in logprobs]))
    return groups_of_rewards


def gradient(config, models, groups, computed):
    """Return the update's gradient by parameter, in float64, from passes over `computed`; and its divisor."""
    policy, stats = models[0], IterationStats(0)
    scale = config.objective.iteration_scale([group_rewards(group) for group in groups])
    for group in groups:
        stats.add_group(group, group in computed)
    for batch, logprobs, loss, entropy in pass_rows(config, models, computed, scale):
        stats.add_loss(batch, logprobs.trainer, None, loss, entropy)
    tally = stats.tally
    counts = (tally.num_tokens - tally.num_rejected_tokens, tally.num_responses, tally.num_pairs)
    divisor = max(1, config.objective.denominator(*counts, config.rollout.max_response_tokens))
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad / divisor
        for name, parameter in policy.named_parameters()
    }
    return gradients, replace(tally, num_rejected_tokens=0), divisor


@pytest.mark.parametrize("budget", [4096, 20])
@pytest.mark.parametrize(("kind", "extra"), CASES)
def test_update_is_the_one_with_every_group_computed(kind, extra, budget, models, groups):
    config = config_of(kind, extra, training={"max_tokens_per_micro_batch": budget})
    signal = [group for group in groups if config.objective.has_signal(group_rewards(group))]
    assert [groups[1], groups[3]] == [group for group in signal if group in (groups[1], groups[3])]
    expected, expected_tally, expected_divisor = gradient(config, models, groups, groups)
    computed, tally, divisor = gradient(config, models, groups, signal)
    assert (tally, divisor) == (expected_tally, expected_divisor)
    assert max(value.abs().max().item() for value in expected.values()) > 1e-3
    for name, value in expected.items():
        torch.testing.assert_close(computed[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "extra"), CASES)
def test_equal_rewards_have_signal_only_where_a_pass_matters(kind, extra, models, groups):
    config, has_effect = config_of(kind, extra), False
    for group in (uniform := groups[::2]):
        computed, _, divisor = gradient(config, models, [group], [group])
        _, _, divisor_without = gradient(config, models, [group], [])
        has_effect = has_effect or divisor != divisor_without or any(value.any() for value in computed.values())
    assert [config.objective.has_signal(group_rewards(group)) for group in uniform] == [has_effect] * 3
    assert [cost(group, config) > 0 for group in uniform] == [has_effect] * 3


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "online_dpo"])
def test_advantages_of_equal_rewards_are_exactly_zero(kind):
    objective = config_of(kind, "plain").objective
    sizes = [(reward, size) for reward in (0.1, 0.3, 0.7, 1e-3) for size in range(2, 20)]
    assert any((r := torch.full((size,), reward)).mean() != r[0] for reward, size in sizes)
    for reward, size in sizes:
        assert torch.equal(objective.group_advantages(torch.full((size,), reward), 1e-8), torch.zeros(size))


@pytest.mark.parametrize("kind", KINDS)
def test_rewards_decide_as_the_loss_sees_them(kind):
    """Rewards travel as float64, and the loss takes float32: a difference that is lost there is no signal."""
    config = config_of(kind, "plain")
    for rewards, expected in (([1.0, 1.0 + 1e-12, 1.0], False), ([1.0, 1.0 + 1e-6, 1.0], True), ([], False)):
        group = make_group("0-0", 4, (2, 3, 4)[: len(rewards)], rewards=rewards)
        assert config.objective.has_signal(group_rewards(group)) == expected
        assert (cost(group, config) > 0) == expected
        assert do_rewards_differ(group) == expected
        stats = IterationStats(0)
        stats.add_group(group, is_trained=expected)
        assert stats.sums["rollout/uniform_groups"] == (bool(rewards) and not expected)


def mixed_iteration(iteration, uniform):
    """Four groups; those with an index in `uniform` have no signal."""
    return rewarded_iteration(iteration, [[0.1] * 3 if i in uniform else MIXED[0] for i in range(4)])


def strict(kind, num_iterations=1, **sections):
    schedule = {"mode": "sync", "num_iterations": num_iterations}
    return job_config(objective={"type": kind}, schedule=schedule, **sections)


@pytest.mark.parametrize("kind", KINDS)
def test_no_pass_for_groups_without_signal_and_the_same_bits(kind, tmp_path, monkeypatch, calls_of):
    """A row for each response, so that leaving some out moves no other: what is left out adds exact zeros."""
    groups = mixed_iteration(0, {0, 2}) + mixed_iteration(1, {0, 1, 2, 3}) + mixed_iteration(2, {3})
    config = strict(kind, 3, training={"max_tokens_per_micro_batch": 1})
    passes = calls_of(BUILT_IN[kind], "loss")
    trained = train(config, groups, tmp_path / "found", arrivals=4)
    passed = {group_id for _, batch, *_ in passes for group_id in batch.group_ids}
    assert passed >= {"0-1", "0-3", "2-0", "2-1", "2-2"}
    assert not passed & {"0-0", "0-2", "1-1", "1-2", "1-3", "2-3"}
    metrics = trained.job.reports[0]
    assert metrics["train/skipped_groups"] == metrics["rollout/uniform_groups"] == 2
    assert (metrics["num_responses"], metrics["response_tokens"]) == (12, 36)
    assert metrics["reward_mean"] == pytest.approx((6 * 0.1 + 2 * 1.25) / 12)
    monkeypatch.setattr(BUILT_IN[kind], "has_signal", lambda objective, rewards: len(rewards) > 0)  # none is left out
    of_all = train(config, groups, tmp_path / "expected", arrivals=4)
    assert trained.job.version_digests == of_all.job.version_digests
    num_versions = len(set(of_all.job.version_digests))
    assert num_versions == 3, "an iteration without signal still takes its step: momentum moves the weights"


@pytest.mark.parametrize("kind", KINDS)
def test_mismatch_is_measured_when_no_group_has_signal(kind, tmp_path, calls_of):
    """One row is enough, however many the groups would take."""
    passes = calls_of(BUILT_IN[kind], "loss")
    groups = mixed_iteration(0, {0, 1, 2, 3})
    config = strict(kind, training={"max_tokens_per_micro_batch": 1})
    (metrics,) = train(config, groups, tmp_path, arrivals=2).job.reports
    assert [batch.group_ids for _, batch, *_ in passes] == [["0-0"]]
    assert (metrics["train/skipped_groups"], metrics["train/grad_norm"]) == (4, 0.0)
    responses = groups[0].responses[: 2 if kind == "online_dpo" else 1]
    batch = pack([groups[0]], CPU)
    exact, _ = response_logprobs(tiny_model(dtype=torch.float32), batch, 1.0)
    num_tokens = sum(len(response.token_ids) for response in responses)
    gap = (exact - batch.rollout_logprobs)[:num_tokens].abs()
    assert metrics["train/trained_tokens"] == num_tokens
    assert metrics["mismatch_mean"] == pytest.approx(gap.mean().item(), rel=1e-4)


def test_job_stops_after_iterations_without_signal_in_a_row(tmp_path):
    everything, schedule = {0, 1, 2, 3}, {"num_iterations": 9, "stop_without_signal": 2}
    uniform = [everything, {0}, everything, everything, everything, everything]
    groups = [
        group
        for iteration, uniform_groups in enumerate(uniform)
        for group in mixed_iteration(iteration, uniform_groups)
    ]
    config = job_config(schedule=schedule, checkpoint={"every_iterations": 3})
    job = RecordedJob(config, groups, arrivals=4)
    with pytest.raises(JobFailed, match=r"stopped after 4 iterations, the last 2 without signal.* 0\.1 on average"):
        train(config, groups, tmp_path, job=job)
    assert [upto for _, upto, _ in job.checkpoints] == [3, 4]
    job = RecordedJob(config, groups[16:], arrivals=4)
    with pytest.raises(JobFailed, match=r"stopped after 6 iterations.*resume` gives this job 2 more$"):
        train(config, groups[16:], tmp_path, job=job, resume_from=4)
    assert [upto for _, upto, _ in job.checkpoints] == [6]
    is_done = job_config(schedule=schedule | {"num_iterations": 2})
    assert len(train(is_done, groups[:4] + mixed_iteration(1, everything), tmp_path / "done").job.reports) == 2
    goes_on = job_config(schedule={"num_iterations": 2})
    groups = mixed_iteration(0, everything) + mixed_iteration(1, everything)
    assert len(train(goes_on, groups, tmp_path / "goes on").job.reports) == 2


def test_gradients_take_memory_from_the_first_pass_on():
    """They are there before any activation, but not yet while an iteration waits for its first group."""
    gradient, policy, _ = open_update(strict("grpo"))
    model, there = policy.model, []
    parameters = list(model.parameters())
    assert all(parameter.grad is None for parameter in parameters)
    model.get_decoder().register_forward_pre_hook(lambda *args: there.extend(p.grad is not None for p in parameters))
    gradient.add(mixed_iteration(0, {0}))
    assert there
    assert all(there)


@pytest.mark.parametrize("uniform", [{0, 1, 2, 3}, {0, 1, 3}])
def test_shard_without_signal_passes_as_many_rows_as_its_peers(uniform):
    passes = []

    class Peers(World):
        def largest(self, value):
            assert not passes, "peers agree on the number of passes before the first"
            return max(value, 3)

    gradient, policy, _ = open_update(strict("grpo"), world=Peers(), is_sharded=True)
    policy.model.get_decoder().register_forward_hook(lambda *args: passes.append(1))
    gradient.add(mixed_iteration(0, uniform))
    assert len(passes) == 3
    trained = [part.group.group_id for row in gradient.rows for part in row]
    assert trained == [f"0-{i}" for i in range(4) if i not in uniform]
    has_gradient = any(gradient.any() for gradient in policy.optimizer.gradients().values())
    assert has_gradient == (len(uniform) < 4)
