"""What every objective sees of a micro-batch."""

from dataclasses import dataclass

import torch

# Beyond e^20 a ratio only says that the policies have nothing in common; beyond e^88 it is infinite in float32, and its
# gradient NaN even where it is clipped.
MAX_LOG_RATIO = 20.0


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio), finite: no gradient flows beyond the bound."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(frozen=True)
class LossInputs:
    """N response tokens of R responses, in response order. Only `trainer_logprobs` carries a gradient."""

    trainer_logprobs: torch.Tensor  # [N] float32
    old_logprobs: torch.Tensor  # [N] float32, the behaviour policy's, as the trainer computes them
    advantages: torch.Tensor  # [N] float32
    response_lengths: torch.Tensor  # [R] int64

    def __post_init__(self) -> None:
        assert self.trainer_logprobs.shape == self.old_logprobs.shape == self.advantages.shape
        assert int(self.response_lengths.sum()) == len(self.trainer_logprobs)

    @property
    def importance_ratio(self) -> torch.Tensor:
        """[N], exactly 1 where the old policy is the policy."""
        return ratio_of(self.trainer_logprobs - self.old_logprobs)

    def response_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [N]: each token gets the mean over its response."""
        index = torch.arange(len(self.response_lengths), device=values.device)
        response_of_token = index.repeat_interleave(self.response_lengths)
        sums = torch.zeros(len(index), dtype=values.dtype, device=values.device).index_add(0, response_of_token, values)
        return (sums / self.response_lengths)[response_of_token]
