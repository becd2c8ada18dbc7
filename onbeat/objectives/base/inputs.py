"""The inputs of an objective from a micro-batch, and its results.

The broker imports objectives but has no PyTorch, so all modules of objectives import torch inside functions only.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any

# Beyond e^20 a ratio only says that the policies have nothing in common; beyond e^88 it is infinite in float32, and its
# gradient NaN even where it is clipped.
MAX_LOG_RATIO = 20.0


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return exp(log_ratio), finite: no gradient flows beyond the bound."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sum_by_response(values: Tensor, response_lengths: Tensor) -> Tensor:
    """Sum the values [N] over each response -> [R]."""
    import torch

    index = torch.arange(len(response_lengths), device=values.device).repeat_interleave(response_lengths)
    sums = torch.zeros(len(response_lengths), dtype=values.dtype, device=values.device)
    return sums.index_add(0, index, values)


@dataclass(frozen=True)
class Responses:
    """N tokens of R responses, in response order, and the groups that they belong to."""

    rollout_logprobs: Tensor  # [N] float32; [0] for examples, which are no samples
    response_lengths: Tensor  # [R] int64, tokens
    group_rewards: list[Tensor]  # [G] float32 of each group, all of its responses; NaN: no reward (opinions.py)
    members: list[Tensor]  # [M] int64 of each group: which of its responses are here; together R

    def response_sum(self, values: Tensor) -> Tensor:
        """Sum the values [N] over each response -> [R]."""
        return sum_by_response(values, self.response_lengths)


@dataclass(frozen=True)
class Lesson:
    """The teacher's part of a micro-batch, for each of its N response tokens."""

    advantages: Tensor  # [N], added to the objective's own; no gradient
    loss: Tensor | None  # [N], added to the token loss; None: the advantages say it all
    metrics: dict[str, Tensor]  # [N] each


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of every response token, all [N] float32; only `trainer` carries a gradient, and the loss of a
    lesson."""

    trainer: Tensor
    old: Tensor
    ref: Tensor | None
    lesson: Lesson | None = None  # None: there is no teacher


@dataclass(frozen=True)
class LossInputs:
    """N response tokens of R responses, in response order. Only `trainer_logprobs` carries a gradient."""

    trainer_logprobs: Tensor  # [N] float32
    old_logprobs: Tensor  # [N] float32, the behaviour policy's, as the trainer computes them
    advantages: Tensor  # [N] float32
    response_lengths: Tensor  # [R] int64

    def __post_init__(self) -> None:
        assert self.trainer_logprobs.shape == self.old_logprobs.shape == self.advantages.shape

    @property
    def importance_ratio(self) -> Tensor:
        """[N], exactly 1 where the old policy is the policy."""
        return ratio_of(self.trainer_logprobs - self.old_logprobs)

    def response_mean(self, values: Tensor) -> Tensor:
        """Return [N]: each token gets the mean of the values [N] over its response."""
        means = sum_by_response(values, self.response_lengths) / self.response_lengths
        return means.repeat_interleave(self.response_lengths)


@dataclass(frozen=True)
class Loss:
    """An unnormalised sum over a micro-batch, what the band rejected, and quantities for the report."""

    loss_sum: Tensor
    num_rejected_tokens: int
    num_pairs: int
    token_metrics: dict[str, Tensor]  # [N] each
    advantages: Tensor | None = None  # [R]; None: pairs have none
