"""The contract of objectives with the trainer, and what those with advantages share. The formulas are one folder up.

rewards of a group  -> advantages [G]  -> each token's share of the loss [N]  -> importance weights, KL term
                    -> one unnormalised sum for each micro-batch, divided once at the barrier (`normalization`)

An iteration's tokens are counted only when its last rollout is in. So the accumulated gradient is divided, before
clipping: exactly the gradient of the mean.
"""

import re
from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from onbeat.contracts.section import Section
from onbeat.objectives.base.importance import BandImportance, TruncatedImportance
from onbeat.objectives.base.inputs import Logprobs, Loss, LossInputs, Responses, Tensor
from onbeat.objectives.base.kl import KlConfig, kl_estimate
from onbeat.objectives.base.opinions import has_reward, members_with_reward, with_zeros

Normalization = Annotated[
    Literal["token_mean", "sequence_mean", "sequence_sum", "constant"],
    Field(
        description="the loss is summed over tokens and divided by: all tokens; each response's own, then the number "
        "of responses; the number of responses; that times max_response_tokens"
    ),
]
PART = "part:"  # the beginning of a signal that is a part of the reward


def is_signal(rule: str) -> bool:
    """Return whether a group may be said to teach by this rule (`onbeat/streams/signal.py`)."""
    return re.fullmatch(rf"reward|solved|{PART}[A-Za-z0-9_.-]{{1,40}}", rule) is not None


def check_rule(rule: str) -> str:
    if not is_signal(rule):
        raise ValueError(
            f"{rule!r} is no signal; use reward, solved, or part:NAME with the name of a part of the reward"
        )
    return rule


TokenLoss = tuple[Tensor, Tensor | None]  # [N], and where a clip cut the gradient off, [N] bool; None: nowhere


class Objective(Section):
    """An instance is the job's section `[objective]`: its fields are keys of the job. Methods keep no state."""

    kl: KlConfig = KlConfig()
    old_policy: Literal["behaviour", "proximal"] = Field(
        "behaviour",
        description="denominator of the importance ratio. behaviour: the policy that generated; proximal: the policy "
        "at the start of the iteration, with `importance` the decoupled objective (arXiv 2505.24298); `bounded` only",
    )
    importance: TruncatedImportance | BandImportance | None = Field(
        None, discriminator="type", description="correction for the gap between trainer and rollout probabilities"
    )
    signal: Annotated[str, AfterValidator(check_rule)] = Field(
        "reward",
        description="difference between responses that makes a group teach. reward: their rewards; solved: one reaches "
        "`solved_at` and another does not; part:NAME: their values of this part of several rewards. In other groups "
        "all advantages are 0, and dynamic sampling replaces them",
    )
    type: str

    modes: ClassVar[tuple[str, ...]] = ("periodic", "sync", "bounded")  # modes of the schedule
    # A batch-wide statistic has to wait for the whole iteration: in `periodic` that would undo the overlap.
    needs_whole_iteration: ClassVar[bool] = False
    has_importance_ratio: ClassVar[bool] = True  # the ratio divides by the old policy
    needs_reward: ClassVar[bool] = True
    has_advantages: ClassVar[bool] = True  # one for each response, not just for the two of a pair a preference

    @model_validator(mode="after")
    def check_signal(self) -> "Objective":
        if self.signal != "reward" and self.kl.coef > 0 and self.kl.placement == "reward":
            raise ValueError(
                "objective.signal: a KL term in the reward gives advantages to groups without signal; use kl.placement "
                "= 'loss', or signal = 'reward'"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kl.coef > 0

    @property
    def needs_whole_group(self) -> bool:
        """True if the loss ties a group's responses together, so that all are in one micro-batch."""
        return self.kl.coef > 0 and self.kl.placement == "reward"

    def trained_members(self, rewards: Tensor) -> tuple[int, ...]:
        """Return the responses that a pass is for, of a group with these rewards [G]; ascending. NaN is no reward."""
        return members_with_reward(rewards) if self.needs_reward else tuple(range(len(rewards)))

    @property
    def waits_for_iteration(self) -> bool:
        """True if advantages are divided by an `iteration_scale`."""
        return self.needs_whole_iteration

    def compared(self, rewards: Tensor, parts: Tensor, weights: Tensor) -> Tensor:
        """Return what the responses of a group are compared by, [G]: the rewards [G], or a function of their parts
        [K, G] with weights [K], of several rewards. NaN is no opinion. Other methods get this for the rewards."""
        return rewards

    def iteration_scale(self, rewards_by_group: list[Tensor]) -> float:
        """Return the divisor of advantages, from the rewards [G] of all groups; called if `waits_for_iteration`."""
        return 1.0

    @abstractmethod
    def has_signal(self, rewards: Tensor) -> bool:
        """Return whether a group with these rewards [G] can change the update: if not, its passes are redundant. NaN is
        no reward. The rewards of a group without the job's `signal` are equal here and in `loss`."""

    @abstractmethod
    def loss(self, batch: Responses, logprobs: Logprobs, scale: float = 1.0) -> Loss:
        """Compute the objective on one micro-batch, as a sum; `scale` is the iteration's."""

    @abstractmethod
    def denominator(self, num_tokens: int, num_responses: int, num_pairs: int, max_response_tokens: int) -> int:
        """Return the divisor of the sum over all micro-batches; rejected tokens do not count."""


class PolicyObjective(Objective):
    """An objective by advantages from rewards and a token loss from advantages and probabilities: only these differ."""

    normalization: Normalization = "token_mean"
    is_zero_without_advantage: ClassVar[bool] = True  # the token loss; else groups of equal rewards are trained, too

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """Compute [G] from one group's rewards [G], not all equal; independent of other groups and of arrival order."""

    @abstractmethod
    def token_loss(self, inputs: LossInputs) -> TokenLoss:
        """Compute the loss of each token by itself or by its response, so that it is the same in every micro-batch."""

    def group_advantages(self, rewards: Tensor, scale: float = 1.0) -> Tensor:
        """Compute [G] from [G]; exact zeros if all rewards are equal, however their mean is rounded: such a group
        teaches nothing."""
        import torch

        if len(rewards) == 0 or bool((rewards == rewards[0]).all()):
            return torch.zeros_like(rewards)
        advantages = self.advantages(rewards)
        self._check_shape("advantages", advantages, rewards)
        return advantages / scale

    def has_signal(self, rewards: Tensor) -> bool:
        """Return whether the group needs its passes. Zero advantages make the loss 0 for all parameters; then they are
        needed for the gradient of a KL term, or for the tokens that a band takes out of the divisor.
        """
        is_band_in_divisor = isinstance(self.importance, BandImportance) and self.normalization == "token_mean"
        has_other_terms = self.kl.coef > 0 or is_band_in_divisor or not self.is_zero_without_advantage
        rewards = rewards[has_reward(rewards)]
        return len(rewards) > 0 and (has_other_terms or bool(self.group_advantages(rewards).any()))

    def loss(self, batch: Responses, logprobs: Logprobs, scale: float = 1.0) -> Loss:
        import torch

        metrics: dict[str, Tensor] = {}
        kl = torch.zeros_like(logprobs.old)
        if logprobs.ref is not None:
            kl = metrics["kl"] = kl_estimate(self.kl.estimator, logprobs.trainer, logprobs.ref)
        advantages = self._advantages_of(batch, None if logprobs.ref is None else kl.detach(), scale)
        advantages_N = advantages.repeat_interleave(batch.response_lengths)
        if (lesson := logprobs.lesson) is not None:
            metrics |= lesson.metrics
            advantages_N = advantages_N + lesson.advantages
            advantages = advantages + batch.response_sum(lesson.advantages) / batch.response_lengths
        inputs = LossInputs(logprobs.trainer, logprobs.old, advantages_N, batch.response_lengths)
        token_loss, is_clipped = self.token_loss(inputs)
        self._check_shape("token_loss", token_loss, logprobs.old)
        if is_clipped is not None:
            self._check_shape("token_loss, is_clipped", is_clipped, logprobs.old)
        weights = torch.ones_like(logprobs.old)
        is_kept = torch.ones_like(logprobs.old, dtype=torch.bool)
        if self.importance is not None:
            weights, is_kept = self.importance.weights(logprobs.old, batch.rollout_logprobs)
        token_loss = token_loss * weights
        if self.kl.placement == "loss":
            token_loss = token_loss + self.kl.coef * kl * is_kept
        if lesson is not None and lesson.loss is not None:
            token_loss = token_loss + lesson.loss * is_kept
        metrics["clipped_frac"] = torch.zeros_like(is_kept) if is_clipped is None else is_clipped
        metrics |= {"loss": token_loss, "rejected_frac": ~is_kept}
        if self.normalization == "sequence_mean":
            kept_lengths = batch.response_sum(is_kept.float()).clamp(min=1)
            token_loss = token_loss * (1.0 / kept_lengths).repeat_interleave(batch.response_lengths)
        return Loss(token_loss.sum(), int((~is_kept).sum()), 0, metrics, advantages)

    def _check_shape(self, method: str, result: Tensor, like: Tensor) -> None:
        """Raise ValueError for another shape: a sum would be spread over all tokens, and depend on the packing."""
        if result.shape != like.shape:
            expected = f"has shape {list(result.shape)}; expected is {list(like.shape)}"
            raise ValueError(f"objective {self.type}: what {method} returns {expected}, one number for each")

    def _advantages_of(self, batch: Responses, kl: Tensor | None, scale: float) -> Tensor:
        """Return the advantages [R] of the responses that are here, after a penalty in the reward from `kl` [N]."""
        import torch

        rewards = list(batch.group_rewards)
        if self.kl.placement == "reward" and kl is not None:
            penalties = batch.response_sum(self.kl.coef * kl).split([len(here) for here in batch.members])
            for index, (here, penalty) in enumerate(zip(batch.members, penalties, strict=True)):
                rewards[index] = rewards[index] - penalty.new_zeros(len(rewards[index])).index_copy(0, here, penalty)
        advantages = []
        for given, penalized, here in zip(batch.group_rewards, rewards, batch.members, strict=True):
            is_rewarded = has_reward(given)  # a penalty that is NaN is an error, and stays one
            among_rewarded = self.group_advantages(penalized[is_rewarded], scale)
            advantages.append(with_zeros(among_rewarded, is_rewarded)[here])
        return torch.cat(advantages)

    def denominator(self, num_tokens: int, num_responses: int, num_pairs: int, max_response_tokens: int) -> int:
        return {
            "token_mean": num_tokens,
            "sequence_mean": num_responses,
            "sequence_sum": num_responses,
            "constant": num_responses * max_response_tokens,
        }[self.normalization]
