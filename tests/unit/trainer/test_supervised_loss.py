"""Loss and gradient of supervised rows, packed, against a loop over rows and tokens; and the held-out loss."""

import math
import random
from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from onbeat.objectives.base import Logprobs
from onbeat.objectives.sft import SftObjective
from services.trainer import held_out_loss as held_out_module
from services.trainer.held_out_loss import held_out_loss, perplexity
from services.trainer.model.model import response_logprobs, use_attention
from services.trainer.policy import Policy
from services.trainer.supervised import SupervisedRow, pack_rows
from tests.trainer_fixtures import VOCAB, job_config, tiny_model

CPU = torch.device("cpu")
SFT = SftObjective(type="sft")
SHARED = list(range(20))  # a system prompt, which rows in one micro-batch have once


def make_row(seed: int, runs: tuple[int, ...], prefix: tuple[int, ...] = ()) -> SupervisedRow:
    """Make a row of runs of tokens that are not learned, learned, not learned ..."""
    rng = random.Random(seed)
    learned = [index % 2 == 1 for index, length in enumerate(runs) for _ in range(length)]
    tokens = [rng.randrange(VOCAB) for _ in learned]
    return SupervisedRow([*prefix, *tokens], [False] * len(prefix) + learned)


ROWS = [
    make_row(0, (4, 3)),
    make_row(1, (2, 1, 3, 4, 1, 2)),
    make_row(2, (1, 9)),
    make_row(3, (3, 2, 5, 1), tuple(SHARED)),
    make_row(6, (6, 1), tuple(SHARED)),
]


def reference(model) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss and its gradient: each row by itself, through transformers' own attention."""
    use_attention(model, "sdpa")
    losses = []
    for row in ROWS:
        logits = model(input_ids=torch.tensor([row.token_ids])).logits[0]
        for place in range(1, len(row.token_ids)):
            if row.learned[place]:
                losses.append(-logits[place - 1].log_softmax(-1)[row.token_ids[place]])
    mean = sum(losses) / len(losses)
    mean.backward()
    return mean.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("max_tokens", [1, 40, 1000])
@pytest.mark.parametrize("attention", ["onbeat_shared_prompt", "sdpa"])
def test_loss_and_gradient_equal_a_loop_over_rows(attention, max_tokens):
    """Packed in one row, in several and in one each, and in separate padded rows."""
    expected, expected_grads = reference(tiny_model())
    model = tiny_model(attention=attention)
    batches = pack_rows(ROWS, max_tokens, CPU)
    assert len(batches) == {1: 5, 40: 3, 1000: 1}[max_tokens]
    total, num_tokens = 0.0, 0
    for batch in batches:
        trainer = response_logprobs(model, batch, 1.0)[0]
        loss = SFT.loss(batch, Logprobs(trainer, trainer.detach(), None))
        loss.loss_sum.backward()
        total, num_tokens = total + loss.loss_sum.item(), num_tokens + len(batch.target_ids)
        assert loss.token_metrics["loss"].sum().item() == pytest.approx(loss.loss_sum.item())
    divisor = SFT.denominator(num_tokens, len(ROWS), 0, 8)
    assert divisor == sum(sum(row.learned) for row in ROWS)
    assert total / divisor == pytest.approx(expected, abs=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad / divisor, expected_grads[name], rtol=1e-5, atol=1e-6)


def test_rows_in_one_micro_batch_have_their_prefix_once():
    (batch,) = pack_rows([ROWS[3], ROWS[4]], 1000, CPU)
    assert batch.layout.prefix_length == len(SHARED)
    assert batch.token_ids[: len(SHARED)].tolist() == SHARED
    assert len(batch.rollout_logprobs) == 0
    assert batch.target_ids.tolist() == [
        token
        for row in (ROWS[3], ROWS[4])
        for token, is_learned in zip(row.token_ids, row.learned, strict=True)
        if is_learned
    ]


@pytest.mark.parametrize(
    "section", [{"kl": {"coef": 0.1}}, {"importance": {"type": "truncated"}}, {"signal": "solved"}]
)
def test_objective_refuses_what_it_would_ignore(section):
    (name,) = section
    with pytest.raises(ValidationError, match=rf"objective\.{name}.*: sft learns from examples"):
        SftObjective(type="sft", **section)


# ---- held-out rows -------------------------------------------------------------------------------------------------


class Ranks:
    """Two ranks, of which this process is one: sums are recorded, not added."""

    def __init__(self, rank: int, most_batches: int) -> None:
        self.rank, self.size, self.sums, self._most = rank, 2, [], most_batches

    def sum_scalars(self, values):
        self.sums = values
        return values

    def largest(self, value):
        return self._most


def test_held_out_loss_is_the_mean_over_learned_tokens():
    policy = Policy.create(tiny_model(), job_config())
    expected, _ = reference(tiny_model())
    measured = held_out_loss(policy, ROWS, 40)
    assert measured == pytest.approx(expected, abs=1e-12)
    assert perplexity(measured) == pytest.approx(math.exp(expected))
    assert all(parameter.grad is None for parameter in policy.model.parameters())
    assert held_out_loss(policy, [], 40) == 0.0
    assert math.isfinite(perplexity(1e6))


def test_ranks_share_held_out_rows_and_pass_in_lockstep(monkeypatch):
    passes = []

    def counted(model, batch, temperature):
        passes.append(temperature)
        return response_logprobs(model, batch, temperature)

    monkeypatch.setattr(held_out_module, "response_logprobs", counted)
    policy = Policy.create(tiny_model(), job_config())
    whole = held_out_loss(policy, ROWS, 1)
    ranks = [Ranks(rank, most_batches=3) for rank in range(2)]
    for ranked in ranks:
        passes.clear()
        held_out_loss(replace(policy, world=ranked, is_sharded=True), ROWS, 1)
        assert passes == [1.0] * 3  # the second rank has two batches, and an idle one
    total, num_tokens = (sum(values) for values in zip(*(ranked.sums for ranked in ranks), strict=True))
    assert total / num_tokens == pytest.approx(whole, abs=1e-12)
