"""From a job's objective to numbers: advantages, token losses, and what the accumulated sum is divided by.

The formulas are in `algorithm/`, one file each; here is only the choice between them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import torch

from onbeat.config import (
    BandImportance,
    CispoObjective,
    DapoObjective,
    DrGrpoObjective,
    GrpoObjective,
    GspoObjective,
    JobConfig,
    ObjectiveConfig,
    OnlineDpoObjective,
    ReinforcePpObjective,
    RlooObjective,
    TruncatedImportance,
)
from services.trainer.algorithm.advantages import grpo_advantages
from services.trainer.algorithm.cispo import cispo_token_loss
from services.trainer.algorithm.dr_grpo import dr_grpo_advantages
from services.trainer.algorithm.grpo import grpo_token_loss
from services.trainer.algorithm.gspo import gspo_token_loss
from services.trainer.algorithm.importance import band_weights, truncated_weights
from services.trainer.algorithm.inputs import LossInputs
from services.trainer.algorithm.kl import kl_estimate
from services.trainer.algorithm.normalization import denominator, token_weights
from services.trainer.algorithm.online_dpo import best_and_worst, dpo_pair_loss
from services.trainer.algorithm.reinforce_pp import reinforce_pp_advantages
from services.trainer.algorithm.rloo import rloo_advantages, rloo_token_loss

if TYPE_CHECKING:  # batch plans its rows with `has_signal`
    from services.trainer.batch import MicroBatch


@dataclass(frozen=True)
class Logprobs:
    """Of every response token, all [N] float32; only `trainer` carries a gradient."""

    trainer: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor | None


@dataclass(frozen=True)
class Loss:
    """An unnormalised sum over a micro-batch, what the band rejected, and quantities for the report."""

    loss_sum: torch.Tensor
    num_rejected_tokens: int
    num_pairs: int
    token_metrics: dict[str, torch.Tensor]  # [N] each
    advantages: torch.Tensor | None = None  # [R]; None: pairs have none


def needs_reference(objective: ObjectiveConfig) -> bool:
    return objective.kl.coef > 0 or isinstance(objective, OnlineDpoObjective)


def needs_whole_iteration(objective: ObjectiveConfig) -> bool:
    return isinstance(objective, ReinforcePpObjective)


def has_signal(objective: ObjectiveConfig, rewards: torch.Tensor) -> bool:
    """Whether a group with these rewards [G] can change the update: if not, its passes are redundant.

    Zero advantages (or no pair) make the loss 0 for all parameters. What is left then needs the pass: the gradient of a
    KL term, and the tokens that a band takes out of the divisor.
    """
    if len(rewards) == 0:
        return False
    if isinstance(objective, OnlineDpoObjective):
        return best_and_worst(rewards) is not None
    is_band_in_divisor = isinstance(objective.importance, BandImportance) and objective.normalization == "token_mean"
    has_other_terms = objective.kl.coef > 0 or is_band_in_divisor
    return has_other_terms or bool(group_advantages(objective, rewards, scale=1.0).any())


def has_advantages(objective: ObjectiveConfig) -> bool:
    """Whether each response has one, and not just the two of a pair a preference."""
    return not isinstance(objective, OnlineDpoObjective)


def compute_loss(objective: ObjectiveConfig, batch: "MicroBatch", logprobs: Logprobs, scale: float = 1.0) -> Loss:
    """The objective on one micro-batch; `scale` is REINFORCE++'s (`algorithm/reinforce_pp`)."""
    if isinstance(objective, OnlineDpoObjective):
        return online_dpo_loss(objective, batch, logprobs)
    rewards, metrics = batch.group_rewards, {}
    kl = torch.zeros_like(logprobs.old)
    if logprobs.ref is not None:
        kl = metrics["kl"] = kl_estimate(objective.kl.estimator, logprobs.trainer, logprobs.ref)
    if objective.kl.placement == "reward" and logprobs.ref is not None:
        penalties = batch.response_sum(objective.kl.coef * kl.detach()).split([len(group) for group in rewards])
        rewards = [group - penalty for group, penalty in zip(rewards, penalties, strict=True)]
    advantages = torch.cat(
        [group_advantages(objective, group, scale)[here] for group, here in zip(rewards, batch.members, strict=True)]
    )
    advantages_N = advantages.repeat_interleave(batch.response_lengths)
    inputs = LossInputs(logprobs.trainer, logprobs.old, advantages_N, batch.response_lengths)
    token_loss, metrics["clipped_frac"] = policy_token_loss(objective, inputs)
    weights, is_kept = importance_weights(objective, logprobs.old, batch.rollout_logprobs)
    token_loss = token_loss * weights
    if objective.kl.placement == "loss":
        token_loss = token_loss + objective.kl.coef * kl * is_kept
    metrics |= {"loss": token_loss, "rejected_frac": ~is_kept}
    kept_lengths = batch.response_sum(is_kept.float()).clamp(min=1)
    per_token = token_weights(objective.normalization, batch.response_lengths, kept_lengths)
    return Loss((token_loss * per_token).sum(), int((~is_kept).sum()), 0, metrics, advantages)


def group_advantages(objective: ObjectiveConfig, rewards: torch.Tensor, scale: float) -> torch.Tensor:
    """Rewards [G] of one group -> advantages [G]; exact zeros if all are equal, however their mean is rounded."""
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    match objective:
        case GrpoObjective() | DapoObjective() | GspoObjective() | CispoObjective():
            return grpo_advantages(rewards)
        case DrGrpoObjective():
            return dr_grpo_advantages(rewards)
        case RlooObjective():
            return rloo_advantages(rewards)
        case ReinforcePpObjective():
            return reinforce_pp_advantages(rewards, scale)
        case OnlineDpoObjective():
            raise AssertionError("pairs have no advantages")
        case _:
            assert_never(objective)


def policy_token_loss(objective: ObjectiveConfig, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss per token [N] and where a clip acted [N] bool."""
    match objective:
        case GrpoObjective() | DrGrpoObjective() | DapoObjective() | ReinforcePpObjective():
            return grpo_token_loss(inputs, objective.clip_low, objective.clip_high)
        case GspoObjective():
            return gspo_token_loss(inputs, objective.clip_low, objective.clip_high)
        case CispoObjective():
            return cispo_token_loss(inputs, objective.clip_low, objective.clip_high)
        case RlooObjective():
            return rloo_token_loss(inputs), torch.zeros_like(inputs.advantages, dtype=torch.bool)
        case OnlineDpoObjective():
            raise AssertionError("pairs have no token loss")
        case _:
            assert_never(objective)


def importance_weights(
    objective: ObjectiveConfig, old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N] and which tokens stay [N] bool."""
    everything = torch.ones_like(old_logprobs, dtype=torch.bool)
    match objective.importance:
        case None:
            return everything.float(), everything
        case TruncatedImportance(cap=cap):
            return truncated_weights(old_logprobs, rollout_logprobs, cap), everything
        case BandImportance(low=low, high=high):
            return band_weights(old_logprobs, rollout_logprobs, low, high)


def online_dpo_loss(objective: OnlineDpoObjective, batch: "MicroBatch", logprobs: Logprobs) -> Loss:
    assert logprobs.ref is not None
    pairs, first = [], 0
    for rewards, members in zip(batch.group_rewards, batch.members, strict=True):
        if (pair := best_and_worst(rewards)) is not None:
            place = {member: first + index for index, member in enumerate(members.tolist())}
            pairs.append([place[member] for member in pair])
        first += len(members)
    index = torch.tensor(pairs, dtype=torch.int64, device=logprobs.old.device).reshape(-1, 2)
    trainer, ref = batch.response_sum(logprobs.trainer), batch.response_sum(logprobs.ref)
    loss_sum = dpo_pair_loss(trainer, ref, index, objective.beta).sum()
    kl = kl_estimate(objective.kl.estimator, logprobs.trainer, logprobs.ref)
    return Loss(loss_sum, 0, len(pairs), {"kl": kl})


def loss_denominator(config: JobConfig, num_tokens: int, num_responses: int, num_pairs: int) -> int:
    """What the iteration's accumulated sum is divided by; at least 1."""
    if isinstance(config.objective, OnlineDpoObjective):
        return max(1, num_pairs)
    most = config.rollout.max_response_tokens
    return max(1, denominator(config.objective.normalization, num_tokens, num_responses, most))
