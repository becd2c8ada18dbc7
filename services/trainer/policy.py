"""The policies of the tri-model (arXiv 2511.18871), and the optimizer of the first.

    model       in training
    old         frozen: the denominator of the importance ratio, at the weights of an earlier version
    reference   frozen: the target of the KL term; under LoRA the model without its adapters; after a warm start the
                policy at its end
    teacher     frozen: another model with the same tokens (`teacher.py`)

Each is left out where the algebra makes it redundant: old while it equals the policy, reference without a KL term.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from onbeat.config import JobConfig
from onbeat.objectives.base import Logprobs
from services.trainer.attention import forget_compiled
from services.trainer.batch import MicroBatch
from services.trainer.gac import GradientControl
from services.trainer.model.adapter_folder import load_adapter
from services.trainer.model.lora import add_adapters, published_sizes, published_tensors
from services.trainer.model.model import (
    DTYPES,
    enable_gradient_checkpointing,
    frozen_base,
    load_config,
    load_frozen,
    load_model,
    response_logprobs,
    tri_model_logprobs,
)
from services.trainer.model.optimizer import MasterAdamW
from services.trainer.model.sharding import gather_full, load_shards, shard
from services.trainer.model.stored_model import open_model
from services.trainer.model.tensor_files import StoredWeights
from services.trainer.model.whole import check_source
from services.trainer.passes.choice import choose_passes
from services.trainer.teacher import Teacher
from services.trainer.weights.store import Snapshot, num_served, split_evenly
from services.trainer.world import ALONE, World


class OldPolicy:
    """A frozen model that takes on the weights of any held version."""

    def __init__(self, model: Any | None, is_sharded: bool) -> None:
        """Take over the model; its current weights do not matter, as `at` loads those of a held version."""
        self.snapshots: dict[int, Snapshot] = {}  # snapshots by policy version; each rank's part of a sharded model
        self._model, self._is_sharded = model, is_sharded
        self._loaded: int | None = None

    def hold(self, snapshot: Snapshot, oldest_wanted: int) -> None:
        """Hold a version; drop versions below `oldest_wanted`."""
        held = self.snapshots | {snapshot.policy_version: snapshot}
        self.snapshots = {version: held[version] for version in sorted(held) if version >= oldest_wanted}

    def at(self, version: int) -> Any:
        """Return the frozen model at that version."""
        if self._loaded != version:
            snapshot = self.snapshots[version]
            if self._is_sharded:
                load_shards(self._model, snapshot.tensors(), snapshot.holders())
            else:
                load_frozen(self._model, snapshot.tensors())
            self._loaded = version
        return self._model


@dataclass
class Policy:
    model: Any
    reference: Any | None
    old: OldPolicy
    optimizer: MasterAdamW
    control: GradientControl

    compute_dtype: torch.dtype
    world: World = ALONE  # the ranks that train it
    is_sharded: bool = False
    teacher: Teacher | None = None
    started: OldPolicy | None = None  # the reference that takes on the weights at the end of the warm start
    files: dict[str, bytes] = field(default_factory=dict)  # files of the model's folder, beside its weights

    @classmethod
    def create(
        cls,
        model: Any,
        config: JobConfig,
        world: World = ALONE,
        is_sharded: bool = False,
        stored: StoredWeights | None = None,
    ) -> "Policy":
        """Create the policy from a model that is the same on every rank; `is_sharded`: FSDP2, else whole replicas.

        `stored`: the files with the weights of a model to be sharded that has none yet.
        """
        dtype = next(model.parameters()).dtype
        old = frozen_base(model) if has_old_policies(config) else None
        reference = None
        started = frozen_base(model) if config.has_started_reference else None
        if config.objective.needs_reference and started is None:
            reference = model if config.lora else frozen_base(model)
        if is_sharded:
            for part in (model, old, started, None if reference is model else reference):
                if part is not None:
                    shard(part, world, dtype, stored)
        num_updates = config.training.num_updates_per_iteration
        optimizer = MasterAdamW(model, config.optimizer, config.decay_ends, num_updates)
        control = GradientControl(config.gac, world)
        policy = cls(model, reference, OldPolicy(old, is_sharded), optimizer, control, dtype, world, is_sharded)
        policy.started = None if started is None else OldPolicy(started, is_sharded)
        return policy

    @property
    def held(self) -> dict[int, Snapshot]:
        """The snapshots of earlier versions that passes need, by version: a checkpoint has them, too."""
        return self.old.snapshots | (self.started.snapshots if self.started is not None else {})

    def published(self, skip: Container[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and weights in the compute dtype; all ranks of a sharded model must iterate over all of them."""
        if not self.is_sharded:
            return published_tensors(self.model, skip=skip)
        return published_tensors(self.model, lambda parameter: gather_full(parameter, self.compute_dtype), skip)

    @property
    def holders(self) -> World:
        """The ranks that hold the weights together: all ranks of a sharded model, else each alone."""
        return self.world if self.is_sharded else ALONE

    def published_shard(self) -> dict[str, int]:
        """Return names and sizes of the published tensors that this rank keeps: all, or a run of them if sharded."""
        sizes = published_sizes(self.model)
        served = split_evenly(list(sizes.values()), self.holders.size)[self.holders.rank]
        return dict(list(sizes.items())[served.start : served.stop])

    def published_parameter(self, name: str) -> torch.Tensor:
        """Return one of `published`, of a model without adapters; all ranks of a sharded model must call it."""
        parameter = self.optimizer.parameters[name]
        return gather_full(parameter, self.compute_dtype) if self.is_sharded else parameter

    def logprobs(self, batch: MicroBatch, temperature: float, old_version: int | None) -> tuple[Logprobs, torch.Tensor]:
        """Return all policies' logprobs, with the teacher's lesson, and the entropy [N]. If `old_version` is None, old
        is the policy itself."""
        old = None if old_version is None else self.old.at(old_version)
        reference = self.reference if self.started is None else self.started.at(min(self.started.snapshots))
        return tri_model_logprobs(self.model, old, reference, batch, temperature, self.teacher)

    def logprobs_of_rows(self, batch: MicroBatch) -> tuple[Logprobs, torch.Tensor]:
        """Return the policy's logprobs of examples, which no other policy is compared with, and the entropy [N]."""
        logprobs, entropy = response_logprobs(self.model, batch, 1.0)
        return Logprobs(trainer=logprobs, old=logprobs.detach(), ref=None), entropy

    @torch.no_grad()
    def logprobs_at(self, version: int, batch: MicroBatch, temperature: float) -> torch.Tensor:
        """Return the logprobs [N] of a held earlier version."""
        return response_logprobs(self.old.at(version), batch, temperature)[0]

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return all that a checkpoint needs besides the published weights; no copies."""
        return self.optimizer.state_tensors() | self.control.state_tensors()

    def load_state_tensors(self, tensors: dict[str, torch.Tensor], num_steps: int) -> None:
        """Restore a checkpoint's tensors. Raises ValueError when they are another model's."""
        self.optimizer.load_state_tensors(tensors, num_steps)
        self.control.load_state_tensors(tensors)


def load_policy(source: str, config: JobConfig, world: World, is_sharded: bool) -> tuple[Policy, str]:
    """Load the job's policy to the world's device, without its teacher. Return also why its responses cannot be packed
    ('' if they can).

    Raises ValueError for a model that cannot be loaded or trained.
    """
    assert config.model.dtype != "auto", "a job's dtype is resolved when a trainer claims it"
    if world.device.type == "cuda":
        forget_compiled()
    dtype, limit = DTYPES[config.model.dtype], config.model.max_context_tokens
    model_config = load_config(source)
    check_source(source, model_config)
    passes, reason = choose_passes(model_config, limit, world.device, dtype, is_sharded)
    opened = open_model(source, dtype, world.device, passes) if is_sharded else None
    model, stored = opened or (load_model(source, dtype, world.device, passes), None)
    if config.training.has_gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if config.lora:
        add_adapters(model, config.lora, config.seed)
        if config.model.adapter:
            load_adapter(model, config)
    return Policy.create(model, config, world, is_sharded, stored), reason


def has_old_policies(config: JobConfig) -> bool:
    """Return whether passes need earlier weights than those in training: stale ones, or, for a ratio, those of before
    the iteration's first update."""
    is_divided_by = config.training.num_updates_per_iteration > 1 and config.objective.has_importance_ratio
    return config.max_staleness > 0 or is_divided_by


def is_served_in_place(config: JobConfig) -> bool:
    """Return whether rollouts may pull the parameters themselves, where these are whole and in host memory: no version
    is needed longer than until the step that makes the next one, and no other step changes it."""
    has_one_version = num_served(config) == 1 and config.num_supervised == 0
    return config.lora is None and has_one_version and config.training.num_updates_per_iteration == 1
