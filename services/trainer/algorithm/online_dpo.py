"""Online DPO (arXiv 2410.18252, after arXiv 2305.18290, eq. 7): preference pairs from a group by reward.

    L = -log sigmoid(beta [(log pi(w) - log ref(w)) - (log pi(l) - log ref(l))])

w and l are the group's best and worst response (first of equals); log pi sums over the response. A group whose rewards
are all equal has no pair. Needs no importance ratio, which is why it bears off-policy rollouts best.
"""

import torch
from torch.nn.functional import logsigmoid


def best_and_worst(rewards: torch.Tensor) -> tuple[int, int] | None:
    """Indices of the pair, or None when all rewards [G] are equal."""
    best, worst = int(rewards.argmax()), int(rewards.argmin())
    return (best, worst) if rewards[best] > rewards[worst] else None


def dpo_pair_loss(
    trainer_logprobs: torch.Tensor, ref_logprobs: torch.Tensor, pairs: torch.Tensor, beta: float
) -> torch.Tensor:
    """Sums over each response [R] (policy, reference) and pairs [M, 2] of (w, l) -> loss per pair [M]."""
    log_ratio = trainer_logprobs - ref_logprobs
    return -logsigmoid(beta * (log_ratio[pairs[:, 0]] - log_ratio[pairs[:, 1]]))
