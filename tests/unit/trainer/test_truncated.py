"""`rollout.truncated` in the trainer: cut responses that are masked, and what each rule does to the estimate."""

import itertools
import math

import pytest
import torch

from onbeat.objectives.base import Logprobs
from onbeat.streams.codec import Turn
from services.rollout.rewards.truncation import reward_truncated
from services.trainer.batch import cost, is_trained, pack, parts_of
from services.trainer.model.model import response_logprobs
from services.trainer.stats import IterationStats, Tally
from tests.trainer_fixtures import job_config, make_group, model_of, open_update, rewarded_iteration, train

CPU = torch.device("cpu")
F = 0.4  # probability that the policy ends its response
OUTCOMES = {("stop", 1.0): 0.3, ("stop", 0.0): 0.1, ("length", 1.0): 0.15, ("length", 0.0): 0.45}  # probabilities
Q, R = 0.75, 0.25  # mean rewards of responses that ended, and that were cut


def config_of(rule, kind="grpo", mode="periodic", objective=None, **rollout):
    return job_config(
        objective={"type": kind, **(objective or {})},
        rollout={"truncated": rule} | rollout,
        schedule={"mode": mode, "num_iterations": 1},
    )


@pytest.mark.parametrize(
    ("rule", "options", "push"),
    [
        ("score", {}, Q - R),
        ("zero", {}, Q),
        ("zero", {"truncated_reward": -0.5}, Q + 0.5),
        ("mask", {}, (1 - F) * (Q - R)),
    ],
)
def test_push_to_end_is_that_of_the_enumeration(rule, options, push):
    """Every group of two of a policy with one parameter, the logit of ending, by its probability.

    The sum of RLOO's loss over a group has, by the logit, the gradient -2 f (1 - f) push.
    """
    config = config_of(rule, "rloo", num_samples_per_prompt=2, **options)
    logit = torch.tensor(math.log(F / (1 - F)), dtype=torch.float64, requires_grad=True)
    ends, is_cut = torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)
    expected_loss = torch.tensor(0.0, dtype=torch.float64)
    for outcomes in itertools.product(OUTCOMES, repeat=2):
        group = make_group("0-0", 4, (1, 1), rewards=[reward for _, reward in outcomes])
        for response, (finish_reason, _) in zip(group.responses, outcomes, strict=True):
            response.finish_reason = finish_reason
        reward_truncated(group, config.rollout)
        if not is_trained(group, config):
            continue
        (part,) = parts_of(group, config)
        trainer = torch.stack([ends if outcomes[member][0] == "stop" else is_cut for member in part.members])
        loss = config.objective.loss(pack([part], CPU), Logprobs(trainer, trainer.detach(), None))
        expected_loss = expected_loss + math.prod(OUTCOMES[outcome] for outcome in outcomes) * loss.loss_sum
    (gradient,) = torch.autograd.grad(expected_loss, logit)
    assert gradient.item() == pytest.approx(-2 * F * (1 - F) * push, rel=1e-6)


def cut(groups, members):
    """Cut those responses of each group."""
    for group, indices in zip(groups, members, strict=True):
        for index in indices:
            group.responses[index].finish_reason = "length"
    return groups


REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.2, 0.4, 0.9]]
CUT = [[1], [], [0, 1, 2], [0, 2]]


@pytest.mark.parametrize("budget", [4096, 8])
def test_masked_update_equals_the_plain_loop(budget):
    config = config_of("mask").model_copy(
        update={"training": job_config(training={"max_tokens_per_micro_batch": budget}).training}
    )
    groups = cut(rewarded_iteration(0, REWARDS), CUT)
    gradient, policy, stats = open_update(config)
    gradient.add(groups)
    computed = {name: value.clone() for name, value in policy.optimizer.gradients().items()}
    model, total, num_tokens = model_of(config), 0.0, 0
    for group, indices in zip(groups, CUT, strict=True):
        logprobs, _ = response_logprobs(model, pack([group], CPU), 1.0)
        rewards = torch.tensor([response.reward for response in group.responses])
        by_response = logprobs.split([len(response.token_ids) for response in group.responses])
        for index, tokens in enumerate(by_response):
            if index not in indices:
                total = total - (rewards[index] - rewards.mean()) / (rewards.std() + 1e-4) * tokens.sum()
                num_tokens += len(tokens)
    total.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert stats.tally == Tally(num_arrived=12, num_tokens=num_tokens, num_responses=6)
    assert max(value.abs().max() for value in expected.values()) > 1e-3
    for name, value in computed.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("extra", [{}, {"kl": {"coef": 0.1}}, {"importance": {"type": "band"}}], ids=["", "kl", "band"])
def test_an_update_of_cut_responses_alone_moves_nothing(extra, tmp_path):
    groups = cut(rewarded_iteration(0, REWARDS), [range(3)] * 4)
    config = config_of("mask", objective=extra)
    assert [cost(group, config) for group in groups] == [0] * 4
    trained = train(config, groups, tmp_path)
    (metrics,) = trained.job.reports
    assert (metrics["train/grad_norm"], metrics["rollout/truncated_frac"]) == (0.0, 1.0)
    assert "mismatch_mean" in metrics
    assert metrics["reward_mean"] == pytest.approx(sum(map(sum, REWARDS)) / 12)


def test_masked_responses_have_no_shown_advantage(tmp_path):
    groups = cut(rewarded_iteration(0, [*REWARDS[:3], [0.5] * 3]), [[1], [], [0, 1, 2], [0]])
    (shown,) = train(config_of("mask"), groups, tmp_path).job.advantages
    assert [value is None for value in shown["0-0"]] == [False, True, False]
    assert shown["0-2"] == [None] * 3
    assert shown["0-3"] == [None, 0.0, 0.0]


@pytest.mark.parametrize("rule", ["score", "zero"])
def test_other_rules_train_cut_responses(rule, tmp_path):
    """The reward of `zero` is set before the trainer gets a group."""
    groups = cut(rewarded_iteration(0, REWARDS), CUT)
    whole = train(config_of(rule), groups, tmp_path / "a", arrivals=4)
    plain = train(config_of("score"), rewarded_iteration(0, REWARDS), tmp_path / "b", arrivals=4)
    assert whole.job.version_digests == plain.job.version_digests


@pytest.mark.parametrize(("turns", "share"), [(("stop", "stop"), 0.0), (("length", "stop"), 1.0)])
def test_an_episode_with_a_cut_turn_is_truncated(turns, share):
    group = make_group("0-0", 4, (2,))
    group.responses[0].turns.extend(Turn(num_shared=4, num_sampled=1, finish_reason=reason) for reason in turns)
    stats = IterationStats(0)
    stats.add_group(group, is_trained=True)
    assert stats.report()["rollout/truncated_frac"] == share
