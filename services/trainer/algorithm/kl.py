"""Per-token estimators of KL(policy || reference) from the sampled token (Schulman, "Approximating KL divergence").

With r = ref - policy (log ratio): k1 = -r, unbiased but noisy; k2 = r^2 / 2, low variance; k3 = exp(r) - 1 - r,
unbiased and never negative.

As a term of the loss only its gradient counts. Expected over the policy's own samples, k2 has that of KL(policy ||
reference), k3 that of KL(reference || policy), and k1 none: as a reward it is right, in the loss it is refused.
"""

import torch

from services.trainer.algorithm.inputs import ratio_of


def kl_estimate(estimator: str, trainer_logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """[N] -> [N], in nats. Raises KeyError for an estimator other than k1, k2, k3."""
    log_ratio = ref_logprobs - trainer_logprobs
    return {"k1": k1, "k2": k2, "k3": k3}[estimator](log_ratio)


def k1(log_ratio: torch.Tensor) -> torch.Tensor:
    return -log_ratio


def k2(log_ratio: torch.Tensor) -> torch.Tensor:
    return 0.5 * log_ratio.square()


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    return ratio_of(log_ratio) - 1.0 - log_ratio
