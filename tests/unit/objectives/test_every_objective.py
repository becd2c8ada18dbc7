"""Every objective against a plain-Python loop over floats, written from the papers' formulas, and its gradient."""

import math
import random
import statistics
import subprocess
import sys

import pytest
import torch
from pydantic import ValidationError

from onbeat.objectives import BUILT_IN
from onbeat.objectives.base import Logprobs, Responses
from services.trainer.batch import group_rewards, pack
from tests.trainer_fixtures import job_config, make_group

LENGTHS = [(3, 1, 4), (2, 5, 2)]
REWARDS = [[0.0, 1.0, 0.25], [1.0, 1.0, 0.0]]


def example():
    """Two groups of three responses with policy, old, reference and rollout log-probabilities per token."""
    rng = random.Random(0)
    groups = [make_group(f"0-{i}", 4, LENGTHS[i], rewards=REWARDS[i]) for i in range(2)]

    def near(values):
        return [value + rng.uniform(-0.4, 0.4) for value in values]

    trainer = [[[-rng.uniform(0.1, 2.0) for _ in range(n)] for n in lengths] for lengths in LENGTHS]
    others = [[[near(tokens) for tokens in group] for group in trainer] for _ in range(3)]
    for group, rollout in zip(groups, others[2], strict=True):
        for response, tokens in zip(group.responses, rollout, strict=True):
            response.rollout_logprobs[:] = tokens
    return groups, trainer, *others


def flat(nested):
    return torch.tensor([value for group in nested for tokens in group for value in tokens])


def clip(value, low, high):
    return max(low, min(high, value))


def advantages(kind, rewards, all_rewards):
    mean = statistics.fmean(rewards)
    if kind in ("grpo", "dapo", "gspo", "cispo"):
        return [(r - mean) / (statistics.stdev(rewards) + 1e-4) for r in rewards]
    if kind == "dr_grpo":
        return [r - mean for r in rewards]
    if kind == "rloo":
        return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    centred = [r - statistics.fmean(group) for group in all_rewards for r in group]
    scale = math.sqrt(statistics.fmean(value**2 for value in centred))
    return [(r - mean) / (scale + 1e-8) for r in rewards]


def token_loss(objective, trainer, old, advantage, t):
    """Return the loss of token t of one response."""
    ratio = math.exp(trainer[t] - old[t])
    if objective.type == "rloo":
        return -ratio * advantage
    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.type == "cispo":
        return -clip(ratio, low, high) * advantage * trainer[t]
    if objective.type == "gspo":
        ratio = math.exp(statistics.fmean(a - b for a, b in zip(trainer, old, strict=True)))
    return -min(ratio * advantage, clip(ratio, low, high) * advantage)


def reference_loss(config, trainer, old, ref, rollout):
    """Return the mean loss, by loops over groups, responses and tokens."""
    objective = config.objective
    total, num_tokens, num_responses = 0.0, 0, 0
    for g, rewards in enumerate(REWARDS):
        if objective.kl.placement == "reward":
            rewards = [
                r - objective.kl.coef * sum(trainer[g][i][t] - ref[g][i][t] for t in range(len(trainer[g][i])))
                for i, r in enumerate(rewards)
            ]
        for i, advantage in enumerate(advantages(objective.type, rewards, REWARDS)):
            losses = []
            for t in range(len(trainer[g][i])):
                is_kept, weight = importance(objective.importance, math.exp(old[g][i][t] - rollout[g][i][t]))
                loss = weight * token_loss(objective, trainer[g][i], old[g][i], advantage, t)
                if objective.kl.placement == "loss":
                    loss += objective.kl.coef * k3(ref[g][i][t] - trainer[g][i][t])
                losses += [loss] if is_kept else []
            num_tokens += len(losses)
            num_responses += 1
            is_mean = objective.normalization == "sequence_mean"
            total += sum(losses) / max(1, len(losses)) if is_mean else sum(losses)
    most = config.rollout.max_response_tokens
    sizes = {"token_mean": num_tokens, "constant": num_responses * most}
    return total / sizes.get(objective.normalization, num_responses)


def k3(r):
    return math.exp(r) - 1 - r


def importance(kind, ratio):
    if kind is None:
        return True, 1.0
    if kind.type == "truncated":
        return True, min(ratio, kind.cap)
    return kind.low <= ratio <= kind.high, ratio


def found_loss(config, groups, trainer, old, ref):
    batch = pack(groups, torch.device("cpu"))
    scale = config.objective.iteration_scale([group_rewards(group) for group in groups])
    loss = config.objective.loss(batch, Logprobs(trainer, old, ref), scale)
    counts = (len(trainer) - loss.num_rejected_tokens, len(batch.response_lengths), loss.num_pairs)
    return loss.loss_sum / config.objective.denominator(*counts, config.rollout.max_response_tokens)


KINDS = ["grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo", "reinforce_pp"]
EXTRAS = {
    "plain": {},
    "kl in the loss": {"kl": {"coef": 0.3}},
    "kl in the reward": {"kl": {"coef": 0.3, "placement": "reward"}},
    "truncated": {"importance": {"type": "truncated", "cap": 1.1}},
    "band": {"importance": {"type": "band", "low": 0.8, "high": 1.2}},
    "sequence_mean": {"normalization": "sequence_mean", "importance": {"type": "band", "low": 0.8, "high": 1.2}},
    "constant": {"normalization": "constant"},
    "sequence_sum": {"normalization": "sequence_sum"},
}


# The job schema refuses it: its scale is known before the pass
@pytest.mark.parametrize(
    ("kind", "extra"), [(k, e) for k in KINDS for e in EXTRAS if (k, e) != ("reinforce_pp", "kl in the reward")]
)
def test_loss_equals_the_plain_loop(kind, extra):
    config = job_config(objective={"type": kind} | EXTRAS[extra], schedule={"mode": "sync"})
    groups, trainer, old, ref, rollout = example()
    loss = found_loss(config, groups, flat(trainer), flat(old), flat(ref))
    assert loss.item() == pytest.approx(reference_loss(config, trainer, old, ref, rollout), rel=1e-5, abs=1e-6)


def test_kl_in_the_reward_is_refused_where_the_scale_comes_first():
    with pytest.raises(ValueError, match="use placement = 'loss'"):
        job_config(objective={"type": "reinforce_pp", "kl": {"placement": "reward"}}, schedule={"mode": "sync"})


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_policy_when_the_ratio_is_one(kind):
    """Every policy objective has the gradient -A * weight / divisor at each token if old = policy."""
    config = job_config(objective={"type": kind}, schedule={"mode": "sync"})
    groups, nested, *_ = example()
    trainer = flat(nested).requires_grad_()
    found_loss(config, groups, trainer, trainer.detach(), None).backward()
    expected = []
    for g, rewards in enumerate(REWARDS):
        for i, advantage in enumerate(advantages(kind, rewards, REWARDS)):
            length = LENGTHS[g][i]
            divisor = {"token_mean": 17, "sequence_mean": 6 * length, "sequence_sum": 6, "constant": 6 * 8}
            expected += [-advantage / divisor[config.objective.normalization]] * length
    torch.testing.assert_close(trainer.grad, torch.tensor(expected), rtol=1e-4, atol=1e-7)


def test_online_dpo_pairs_best_with_worst():
    config = job_config(objective={"type": "online_dpo", "beta": 0.5})
    groups, trainer, _, ref, _ = example()
    trainer_N, ref_N = flat(trainer), flat(ref)
    loss = found_loss(config, groups, trainer_N, trainer_N, ref_N)

    def log_ratio(g, i):
        return sum(trainer[g][i]) - sum(ref[g][i])

    margins = [log_ratio(0, 1) - log_ratio(0, 0), log_ratio(1, 0) - log_ratio(1, 2)]
    expected = statistics.fmean(math.log(1 + math.exp(-0.5 * margin)) for margin in margins)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_online_dpo_keeps_small_margins_of_long_responses():
    """Sums over 16,000 tokens are large; their difference from the reference's is not."""
    generator = torch.Generator().manual_seed(0)
    trainer = -4.0 * torch.rand(32_000, generator=generator)
    ref = trainer + 0.02 * torch.randn(32_000, generator=generator)
    lengths, rewards, members = torch.tensor([16_000, 16_000]), [torch.tensor([0.0, 1.0])], [torch.tensor([0, 1])]
    objective = BUILT_IN["online_dpo"](type="online_dpo", beta=1.0)

    def loss_and_gradient(dtype):
        batch = Responses(ref.to(dtype), lengths, rewards, members)
        policy = trainer.to(dtype).requires_grad_()
        loss = objective.loss(batch, Logprobs(policy, policy.detach(), ref.to(dtype))).loss_sum
        return loss.double(), torch.autograd.grad(loss, policy)[0].double()

    for computed, expected in zip(*map(loss_and_gradient, (torch.float32, torch.float64)), strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"kl": {"coef": 0.1}}, "objective.kl.coef: online_dpo has neither a KL term nor importance weights"),
        ({"importance": {"type": "truncated"}}, "objective.importance: online_dpo has neither"),
        ({"importance": {"type": "band"}, "old_policy": "proximal"}, "objective.importance: online_dpo has neither"),
    ],
)
def test_online_dpo_refuses_what_it_would_ignore(section, reason):
    with pytest.raises(ValidationError, match=reason):
        job_config(objective={"type": "online_dpo"} | section, schedule={"mode": "bounded"})


# ---- one file, one objective ---------------------------------------------------------------------------------------


def test_objectives_are_read_where_there_is_no_pytorch():
    code = "import sys; sys.modules['torch'] = None; import services.broker.admission.review, onbeat.objectives as o; "
    code += "print(sorted(type(o.BUILT_IN[name](type=name)).__name__ for name in o.BUILT_IN))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(sorted(objective.__name__ for objective in BUILT_IN.values())), done.stderr
