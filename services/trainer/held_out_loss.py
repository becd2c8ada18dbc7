"""Loss and perplexity on held-out rows, with the packing of the rows that are trained, and without a gradient."""

import math
from collections.abc import Sequence

import torch

from services.trainer.batch import idle_batch
from services.trainer.model.model import response_logprobs
from services.trainer.policy import Policy
from services.trainer.supervised import SupervisedRow, pack_rows

MAX_LOSS = 700.0  # nats; e to the power of more is no number of 64 bits


def perplexity(loss: float) -> float:
    return math.exp(min(loss, MAX_LOSS))


@torch.no_grad()
def held_out_loss(policy: Policy, rows: Sequence[SupervisedRow], max_tokens: int) -> float:
    """Return the mean over the learned tokens of all rows, in nats, of the policy as it is now. All ranks call it with
    the same rows: each passes its part of them, sharded ones in lockstep. `max_tokens`: places of a micro-batch."""
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
    return total / max(1.0, num_everywhere)
