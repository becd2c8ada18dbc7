"""The teacher of a job (`[teacher]`): one more frozen model over the same rows, of any architecture with these tokens.

    batch -> the teacher's own passes -> log-probabilities of the sampled tokens (full vocabulary: hidden states, too)
          -> `TeacherConfig.lesson`: advantages or a loss for each token (onbeat/objectives/base/teacher.py)

Where the policy has a token that the teacher lacks, the teacher reads a stand-in; a sampled one has no term.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from onbeat.config import JobConfig
from onbeat.machine.memory import read_memory
from onbeat.objectives.base.inputs import Lesson
from onbeat.objectives.base.teacher import TeacherConfig
from services.prompts.tokenizer import TOKENIZER_FILE, file_of_model, load_tokenizer
from services.trainer.batch import MicroBatch
from services.trainer.model.bundled import resolve_model
from services.trainer.model.divergence import TeacherHead
from services.trainer.model.logprobs import TargetLogprobs
from services.trainer.model.lora import published_tensors
from services.trainer.model.model import (
    DTYPES,
    Compare,
    Passes,
    Prepared,
    hidden_states,
    load_config,
    load_model,
    prepare_inputs,
    target_logprobs,
)
from services.trainer.model.sharding import call, gather_full, shard
from services.trainer.model.stored_model import open_model
from services.trainer.model.whole import check_source
from services.trainer.passes.choice import choose_passes
from services.trainer.passes.shrink import num_parameters
from services.trainer.passes.trial import architecture_name
from services.trainer.vocabularies import Vocabulary, shared_ids, vocabulary_of
from services.trainer.world import World

GB = 1e9
STAND_INS = ("unk_token_id", "pad_token_id", "eos_token_id")


@dataclass(frozen=True)
class Reading:
    """The results of the teacher's pass over a batch of N response tokens."""

    config: TeacherConfig
    logprobs: torch.Tensor  # [N]
    is_known: torch.Tensor  # [N] bool
    compare: Compare | None = None

    def lesson(self, trainer_logprobs: torch.Tensor, divergence: torch.Tensor | None = None) -> Lesson:
        return self.config.lesson(trainer_logprobs, self.logprobs, self.is_known, divergence)


@dataclass(frozen=True)
class Teacher:
    model: Any
    config: TeacherConfig
    is_known: torch.Tensor  # [V] bool, by the policy's ids: the tokens that the teacher has, too
    is_complete: bool  # all are known
    stand_in: int = 0  # the token that it reads in place of one that it lacks
    digest: str = ""
    reason: str = ""  # why its responses cannot be packed; '' if they can

    @torch.no_grad()
    def read(self, batch: MicroBatch, temperature: float, prepared: Prepared | None = None) -> Reading:
        """Pass the batch through the teacher. `prepared`: its inputs, if they are not to be made from the batch."""
        batch = batch if batch.for_teacher is None else batch.for_teacher
        is_known = self.is_known[batch.target_ids]
        if not self.is_complete:
            batch = replace(
                batch, token_ids=self._readable(batch.token_ids), target_ids=self._readable(batch.target_ids)
            )
        prepared = prepared or prepare_inputs(self.model, batch)
        if self.config.divergence == "sampled_token":
            return Reading(self.config, target_logprobs(self.model, prepared, batch, temperature)[0], is_known)
        logprobs, hidden, weight = call(pass_with_states, self.model, prepared, batch, temperature)
        head = TeacherHead(hidden, weight, self.is_known, self.config.gap, temperature)
        return Reading(self.config, logprobs, is_known, head.compare)

    def _readable(self, token_ids: torch.Tensor) -> torch.Tensor:
        return token_ids.where(self.is_known[token_ids], self.stand_in)


def pass_with_states(
    model: Any, prepared: Prepared, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probabilities [N] of the targets, the states that predict them, and the head. That of a sharded
    model stays whole: no pass without a gradient shards the root again."""
    hidden, weight = hidden_states(model, prepared)
    logprobs, _ = TargetLogprobs.apply(hidden, weight, batch.target_ids, temperature)
    return logprobs, hidden, weight


def load_teacher(
    config: JobConfig, student: Any, student_source: str, cache_dir: Path, world: World, is_sharded: bool
) -> Teacher | None:
    """Load the job's teacher, if it has one, to the world's device; all ranks of a sharded job must call it. `student`:
    the policy, from the folder or hub id `student_source`.

    Raises ValueError for one that cannot be loaded, has other tokens, or does not fit into memory.
    """
    if config.teacher is None:
        return None
    assert config.model.dtype != "auto", "a job's dtype is resolved when a trainer claims it"
    with naming("teacher.path"):
        source = resolve_model(config.teacher.path, cache_dir)
        teacher_config = load_config(source)
        check_source(source, teacher_config)
        dtype, limit = DTYPES[config.model.dtype], config.model.max_context_tokens
        check_context(source, teacher_config, config)
        num_rows = [part.get_text_config().vocab_size for part in (student.config, teacher_config)]
        is_known = known_tokens(vocabulary_of(student_source), vocabulary_of(source), *num_rows)
        passes, reason = choose_passes(teacher_config, limit, world.device, dtype, is_sharded)
        for name, choice in ((type(student).__name__, student.passes), (architecture_name(teacher_config), passes)):
            check_full_vocabulary(config.teacher, name, choice)
        check_memory(num_parameters(teacher_config) * dtype.itemsize // (world.size if is_sharded else 1), world.device)
        opened = open_model(source, dtype, world.device, passes) if is_sharded else None
        model, stored = opened or (load_model(source, dtype, world.device, passes), None)
    model.requires_grad_(False)
    if is_sharded:
        shard(model, world, dtype, stored)
    return Teacher(
        model,
        config.teacher,
        is_known.to(world.device),
        is_complete=bool(is_known.all()),
        stand_in=stand_in_of(source, num_rows[1]),
        digest=digest_of(source, model, dtype),
        reason=reason,
    )


@contextmanager
def naming(field: str) -> Iterator[None]:
    """Raise ValueErrors of the block with the job's field in front."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


# ---- what a teacher is refused for -----------------------------------------------------------------------------------


def known_tokens(student: Vocabulary, teacher: Vocabulary, num_rows: int, num_teacher_rows: int) -> torch.Tensor:
    """Return which of the policy's ids [V] the teacher has as the same tokens. Rows without a token may differ.

    Raises ValueError if a shared id is another token.
    """
    shared = shared_ids(student, teacher)
    is_known = torch.zeros(num_rows, dtype=torch.bool)
    is_known[[token_id for token_id in shared if token_id < min(num_rows, num_teacher_rows)]] = True
    return is_known


def check_context(source: str, teacher: Any, config: JobConfig) -> None:
    """Raise ValueError for a teacher that does not support sequences as long as the job's."""
    supported, wanted = (
        getattr(teacher.get_text_config(), "max_position_embeddings", None),
        config.model.max_context_tokens,
    )
    if supported is not None and wanted is not None and wanted > supported:
        raise ValueError(
            f"{source} supports {supported} tokens, and model.max_context_tokens is {wanted}; lower that to "
            f"{supported}, or take another teacher"
        )


def check_full_vocabulary(teacher: TeacherConfig, name: str, passes: Passes) -> None:
    """Raise ValueError if a model's logits are more than states times a matrix, and those are to be compared."""
    if teacher.divergence == "full_vocabulary" and not passes.has_plain_head:
        raise ValueError(
            "teacher.divergence: full_vocabulary needs logits that are just hidden states times a matrix, and those of "
            f"{name} are more; use sampled_token"
        )


def check_memory(size_bytes: int, device: torch.device) -> None:
    """Raise ValueError for weights that the device, or the host beside it, has no memory for."""
    available = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else read_memory().available_bytes
    if size_bytes > available:
        raise ValueError(
            f"its weights take {size_bytes / GB:.1f} GB here, and {available / GB:.1f} GB are available; take a "
            "smaller teacher, or more ranks with ONBEAT_PARALLELISM=fsdp (`onbeat plan memory` has the parts)"
        )


def check_record(teacher: Teacher, recorded: str) -> None:
    """Raise ValueError if the job began with another teacher, by the digest that it has recorded."""
    if recorded != teacher.digest:
        raise ValueError(
            f"teacher.path: {teacher.config.path} has the digest {teacher.digest[:12]}, and the job has learned "
            f"from one with {recorded[:12]}; put that model back, or submit a new job"
        )


# ---- what a teacher is -----------------------------------------------------------------------------------------------


def stand_in_of(source: str, num_rows: int) -> int:
    """Return the teacher's token that is neutral in place of one that it lacks."""
    tokenizer = load_tokenizer(source)
    named = (getattr(tokenizer, name, None) for name in STAND_INS)
    return next((token_id for token_id in named if token_id is not None and token_id < num_rows), 0)


def digest_of(source: str, model: Any, dtype: torch.dtype) -> str:
    """Return the BLAKE3 of a model: its configuration and tokenizer as files, and its tensors in the compute dtype. All
    ranks of a sharded model must call it."""
    whole = blake3(max_threads=blake3.AUTO)
    for name in ("config.json", TOKENIZER_FILE):
        file = file_of_model(source, name)
        whole.update(b"" if file is None else file.read_bytes())
    for name, tensor in published_tensors(model, lambda parameter: gather_full(parameter, dtype)):
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        content = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
        whole.update(content.numpy().data)
    return whole.hexdigest()
