"""Loss and perplexity on held-out rows, with the packing of the rows that are trained, and without a gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.trainer.batch import idle_batch
from services.trainer.model.model import response_logprobs
from services.trainer.policy import Policy
from services.trainer.supervised import SupervisedRow, pack_rows

MAX_LOSS = 700.0  # nats; e to the power of more is no number of 64 bits


@dataclass(frozen=True)
class HeldOutLoss:
    loss: float  # nats, the mean over the learned tokens of all rows
    num_tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, MAX_LOSS))


@torch.no_grad()
def held_out_loss(policy: Policy, rows: Sequence[SupervisedRow], max_tokens: int) -> HeldOutLoss:
    """Measure the policy as it is now. All ranks call it with the same rows: each passes its part of them, sharded ones
    in lockstep. `max_tokens`: places of a micro-batch."""
    world, model = policy.world, policy.model
    device = next(model.parameters()).device
    batches = pack_rows(rows[world.rank :: world.size], max_tokens, device)
    total, num_tokens = 0.0, 0
    for batch in batches:
        total -= response_logprobs(model, batch, 1.0)[0].sum(dtype=torch.float64).item()
        num_tokens += len(batch.target_ids)
    if policy.is_sharded:
        for _ in range(world.largest(len(batches)) - len(batches)):
            response_logprobs(model, idle_batch(device), 1.0)
    total, num_everywhere = world.sum_scalars([total, num_tokens])
    return HeldOutLoss(total / max(1.0, num_everywhere), int(num_everywhere))
