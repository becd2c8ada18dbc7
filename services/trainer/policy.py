"""The policies of the tri-model (arXiv 2511.18871) and what moves the first.

    model       in training
    old         frozen: the denominator of the importance ratio, at the weights of an earlier version
    reference   frozen: what the KL term pulls towards; under LoRA the model without its adapters

Each is left out where the algebra makes it redundant: old while it equals the policy, reference without a KL term.
"""

from dataclasses import dataclass
from typing import Any

import torch

from onbeat.config import JobConfig, OnlineDpoObjective
from services.trainer.batch import MicroBatch
from services.trainer.gradient_control import GradientControl
from services.trainer.lora import add_adapters
from services.trainer.model import (
    DTYPES,
    enable_gradient_checkpointing,
    freeze_copy,
    frozen_like,
    load_frozen,
    load_model,
    tri_model_logprobs,
)
from services.trainer.objective import Logprobs, needs_reference
from services.trainer.optimizer import MasterAdamW
from services.trainer.packing import choose_attention
from services.trainer.weight_store import Snapshot


class OldPolicy:
    """One frozen model that takes on the weights of any version that is held."""

    def __init__(self) -> None:
        self.snapshots: dict[int, Snapshot] = {}  # by policy version
        self._model: Any | None = None
        self._loaded: int | None = None

    def hold(self, snapshot: Snapshot, oldest_wanted: int) -> None:
        """Versions below `oldest_wanted` are dropped."""
        held = self.snapshots | {snapshot.policy_version: snapshot}
        self.snapshots = {version: held[version] for version in sorted(held) if version >= oldest_wanted}

    def at(self, version: int, model: Any) -> Any:
        """The frozen model at that version; `model` is what it is a copy of."""
        if self._model is None:
            self._model = frozen_like(model)
        if self._loaded != version:
            load_frozen(self._model, self.snapshots[version].tensors())
            self._loaded = version
        return self._model


@dataclass
class Policy:
    model: Any
    reference: Any | None
    old: OldPolicy
    optimizer: MasterAdamW
    control: GradientControl

    @classmethod
    def create(cls, model: Any, config: JobConfig) -> "Policy":
        reference = None
        if needs_reference(config.objective):
            reference = model if config.lora else freeze_copy(model)
        return cls(model, reference, OldPolicy(), MasterAdamW(model, config.optimizer), GradientControl(config.gac))

    def logprobs(self, batch: MicroBatch, temperature: float, old_version: int | None) -> tuple[Logprobs, torch.Tensor]:
        """All policies on one packed micro-batch, and the entropy [N]. `old_version` None: old is the policy itself."""
        old = None if old_version is None else self.old.at(old_version, self.model)
        trainer_logprobs, entropy, old_logprobs, ref_logprobs = tri_model_logprobs(
            self.model, old, self.reference, batch, temperature
        )
        old_logprobs = trainer_logprobs.detach() if old_logprobs is None else old_logprobs
        return Logprobs(trainer_logprobs, old_logprobs, ref_logprobs), entropy

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All that a checkpoint needs besides the published weights; no copies."""
        return self.optimizer.state_tensors() | self.control.state_tensors()

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], num_steps: int) -> None:
        """Raises ValueError when they are another model's."""
        self.optimizer.load_state_tensors(tensors, num_steps)
        self.control.load_state_tensors(tensors)


def load_policy(source: str, config: JobConfig, device: torch.device) -> tuple[Policy, str]:
    """The job's policy on the device, and why its responses cannot be packed ('' if they can). Raises ValueError."""
    model = load_model(source, DTYPES[config.model.dtype], device)
    longest = config.model.max_context_tokens or model.config.max_position_embeddings
    reason = choose_attention(model, longest)
    if config.training.has_gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if config.lora:
        add_adapters(model, config.lora, config.seed)
    return Policy.create(model, config), reason


def old_version(config: JobConfig, behaviour_version: int, current_version: int, num_updates_done: int) -> int | None:
    """Which version the importance ratio divides by; None when that is the policy itself, and the ratio 1.

    `current_version` is that of the weights at the iteration's start; each update since has moved them.
    """
    if isinstance(config.objective, OnlineDpoObjective):
        return None  # has no ratio
    wanted = behaviour_version if config.objective.old_policy == "behaviour" else current_version
    return None if wanted == current_version and num_updates_done == 0 else wanted
