"""The policy and its frozen relatives as transformers models, and their log-probabilities on a packed micro-batch."""

import copy
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub.errors import StrictDataclassError

from onbeat.objectives.base import Logprobs
from onbeat.objectives.base.inputs import Lesson
from services.prompts.tokenizer import TOKENIZER_FILE, file_of_model, load_tokenizer
from services.trainer.attention import no_mask, packed_attention, plan_attention
from services.trainer.batch import MicroBatch
from services.trainer.model.expert_lora import remove_factors
from services.trainer.model.lean_layers import use_lean_layers
from services.trainer.model.logprobs import TargetLogprobs
from services.trainer.model.lora import adapted_layers, published_tensors, without_adapters
from services.trainer.model.sharding import call
from services.trainer.model.whole import check_loaded

PACKED_ATTENTION = "onbeat_shared_prompt"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Passes:
    """The passes of a model over a micro-batch; `trial.py` finds out which are right for its architecture."""

    attention: str = PACKED_ATTENTION  # or transformers' own, `sdpa` or `eager`: then each response is a separate row
    is_padded: bool = True  # rows are padded to one length, in one pass; otherwise each length has its own pass
    has_plain_head: bool = True  # the logits are just hidden states times a matrix: no bias, no cap, no scale
    bypassed: frozenset[str] = frozenset()  # roles of layers that take no adapters, as lora.bypassed_layers finds them

    @property
    def is_packed(self) -> bool:
        return self.attention == PACKED_ATTENTION


@contextmanager
def loading(source: str) -> Iterator[None]:
    """Raise ValueError naming the model when transformers cannot load it."""
    try:
        yield
    except (OSError, StrictDataclassError, ValueError) as error:
        raise ValueError(f"model {source!r} cannot be loaded: {error}") from error


def load_config(source: str) -> Any:
    """Load the model's configuration. Raises ValueError naming the model."""
    from transformers import AutoConfig

    with loading(source):
        return AutoConfig.from_pretrained(source)


def load_model(source: str, dtype: torch.dtype, device: torch.device, passes: Passes = Passes()) -> Any:
    """Load a decoder for those passes, with parameters in the compute dtype. Raises ValueError naming the model.

    The attention is set when the model is built, not switched later: some classes choose theirs in the constructor.
    """
    from transformers import AutoModelForCausalLM

    register_attention()
    options: dict[str, Any] = {"attn_implementation": passes.attention}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # `check_loaded` says it better
    with loading(source):
        model, report = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    check_loaded(source, model, report)
    return set_up(model, passes, device)


def set_up(model: Any, passes: Passes, device: torch.device) -> Any:
    """Prepare a transformers model that was built with the attention of these passes: device, no cache, no dropout,
    and layers that keep less for the backward pass."""
    model.passes = passes
    model.config.use_cache = False
    model.to(device).eval()
    use_lean_layers(model)
    return model


def register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, no_mask)


def use_attention(model: Any, name: str) -> None:
    """Switch a built model, if its class supports it, to other passes: PACKED_ATTENTION, or padded rows with `sdpa` or
    `eager`. Only tests and benchmarks switch, to compare."""
    model.set_attn_implementation(name)
    model.passes = replace(getattr(model, "passes", Passes()), attention=name)


def enable_gradient_checkpointing(model: Any) -> None:
    """Keep only each decoder layer's input for the backward pass, which computes the rest again.

    It wraps the layers' `forward` instead of using transformers' own switch, which works in training mode only and
    would turn on dropout, which a policy gradient must not have. Call it before adding hooks or sharding.
    Raises ValueError for a model whose layers transformers does not mark as such.
    """
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"training.has_gradient_checkpointing: {type(model).__name__} has no layers that can be computed again; "
            "turn it off and lower training.max_tokens_per_micro_batch instead"
        )
    for layer in layers:  # no random numbers in eval mode, so none to restore
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def frozen_base(model: Any) -> Any:
    """Return a frozen copy of the model without its adapters; published weights can be loaded into it."""
    frozen = copy.deepcopy(model).requires_grad_(False)
    for name, layer in adapted_layers(frozen).items():
        frozen.set_submodule(name, layer.get_base_layer())
    remove_factors(frozen)
    return frozen


@torch.no_grad()
def load_frozen(frozen: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Overwrite a frozen copy with its published tensors, each once, by name and with the same shape."""
    left = dict(published_tensors(frozen))
    for name, tensor in tensors:
        parameter = left.pop(name)
        assert parameter.shape == tensor.shape, f"{name} has shape {tuple(tensor.shape)}, not {tuple(parameter.shape)}"
        parameter.copy_(tensor)
    assert not left, f"nothing for {', '.join(left)}"


def model_files(source: str, dtype: torch.dtype, chat_template: str | None = None) -> dict[str, bytes]:
    """Return the config and tokenizer files by name, which a rollout needs besides weights.

    `tokenizer.json` stays as it is. `chat_template`: that of the job, in place of the model's own.
    The config names the dtype of the weights that are published and exported, whatever that of the source was:
    `from_pretrained` would round them to it.
    """
    from transformers import AutoConfig
    from transformers.utils import GENERATION_CONFIG_NAME, cached_file

    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(source)
        config.dtype = config.get_text_config().dtype = dtype
        config.save_pretrained(folder)
        load_tokenizer(source, chat_template).save_pretrained(folder)
        if file := file_of_model(source, TOKENIZER_FILE):
            shutil.copy(file, Path(folder, TOKENIZER_FILE))
        with suppress(OSError):  # not every model has one; as it is, because transformers refuses to save some
            shutil.copy(cached_file(source, GENERATION_CONFIG_NAME), Path(folder, GENERATION_CONFIG_NAME))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


class Teacher(Protocol):
    """A frozen model with rows of its own, which may have another architecture (`teacher.py`)."""

    def read(self, batch: MicroBatch, temperature: float) -> "Reading": ...


class Reading(Protocol):
    """The results of a teacher's pass. `compare`: from hidden states and head of the policy, [N]; None: not needed."""

    @property
    def compare(self) -> "Compare | None": ...
    def lesson(self, trainer_logprobs: torch.Tensor, divergence: torch.Tensor | None = None) -> Lesson: ...


def tri_model_logprobs(
    policy: Any,
    old: Any | None,
    reference: Any | None,
    batch: MicroBatch,
    temperature: float,
    teacher: Teacher | None = None,
) -> tuple[Logprobs, torch.Tensor]:
    """Return the logprobs of all policies and the entropy of the first, [N].

    One micro-batch, packed and planned once, goes through up to three models. None skips a model: then old is the
    policy itself, and there is no reference. If `reference` is the policy itself, it is used without its adapters.
    A `teacher` reads the same batch.
    Frozen models go first: their memory is free again before the policy keeps its activations.
    """
    prepared = prepare_inputs(policy, batch)
    with torch.no_grad():
        old_logprobs = None if old is None else target_logprobs(old, prepared, batch, temperature)[0]
        ref_logprobs = None
        if reference is not None:
            with without_adapters(policy) if reference is policy else nullcontext():
                ref_logprobs = target_logprobs(reference, prepared, batch, temperature)[0]
        reading = None if teacher is None else teacher.read(batch, temperature)
    compare = None if reading is None else reading.compare
    trainer_logprobs, entropy, *divergence = target_logprobs(policy, prepared, batch, temperature, compare)
    lesson = None if reading is None else reading.lesson(trainer_logprobs.detach(), *divergence)
    if old_logprobs is None:
        old_logprobs = trainer_logprobs.detach()
    return Logprobs(trainer_logprobs, old_logprobs, ref_logprobs, lesson), entropy


def response_logprobs(model: Any, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probability of every response token under the tempered policy, and the entropy (no gradient).

    Both are [N] float32 (float64 for a float64 model).
    """
    logprobs, entropy = target_logprobs(model, prepare_inputs(model, batch), batch, temperature)
    return logprobs, entropy


Compare = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # hidden [N, D], head [V, D] -> [N]
Hidden = list[torch.Tensor]  # states of each pass, [rows, T, ...]
Prepared = tuple[list[dict[str, Any]], Callable[[Hidden], torch.Tensor]]  # inputs; select the targets' rows, [N, ...]


def target_logprobs(
    model: Any, prepared: Prepared, batch: MicroBatch, temperature: float, compare: Compare | None = None
) -> tuple[torch.Tensor, ...]:
    """Compute `response_logprobs` on prepared inputs, and the result of `compare`, if it is there. Logits exist only
    where a response token is predicted."""
    return call(whole_model_logprobs, model, prepared, batch, temperature, compare)


def whole_model_logprobs(
    model: Any, prepared: Prepared, batch: MicroBatch, temperature: float, compare: Compare | None = None
) -> tuple[torch.Tensor, ...]:
    """Compute `target_logprobs` inside `sharding.call`, where the head's weight is whole."""
    passes, select = prepared
    if model.passes.has_plain_head:
        hidden, weight = hidden_states(model, prepared)
        logprobs, entropy = TargetLogprobs.apply(hidden, weight, batch.target_ids, temperature)
        return (logprobs, entropy) if compare is None else (logprobs, entropy, compare(hidden, weight))
    assert compare is None, "a comparison needs hidden states that the head only multiplies"
    logits = select([model(**inputs).logits for inputs in passes])
    log_probabilities = (logits.float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return log_probabilities.gather(-1, batch.target_ids[:, None])[:, 0], entropy


def hidden_states(model: Any, prepared: Prepared) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states that predict the targets, [N, D], and the weight of the head, [V, D], for plain heads. Call it
    inside `sharding.call`."""
    passes, select = prepared
    decoder = model.get_decoder()
    return select([decoder(**inputs).last_hidden_state for inputs in passes]), model.get_output_embeddings().weight


def prepare_inputs(model: Any, batch: MicroBatch) -> Prepared:
    """Prepare what depends on the micro-batch only, for every model of this architecture, dtype and attention: one row
    with each prompt once, where it can be packed."""
    if not model.passes.is_packed:
        return separate_inputs(batch, model.passes.is_padded)
    inputs = {
        "input_ids": batch.token_ids[None],
        "position_ids": batch.layout.position_ids[None],
        "layout_plan": plan_attention(batch.layout),
        "use_cache": False,
    }
    return [inputs], lambda outputs: outputs[0][0].index_select(0, batch.layout.logit_index)


def separate_inputs(batch: MicroBatch, is_padded: bool) -> Prepared:
    """Prepare a row per response, each with its prompt, for attention that cannot be packed: one pass of padded rows,
    or one pass for each length. A response that forks has a row for each of its paths."""
    rows, row_of_target = separate_rows(batch)
    longest = max(map(len, rows))
    by_length: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_length.setdefault(longest if is_padded else len(row), []).append(index)
    passes = []
    for indices in by_length.values():
        input_ids = torch.nn.utils.rnn.pad_sequence([rows[index] for index in indices], batch_first=True)
        passes.append({"input_ids": input_ids, "use_cache": False})
    if is_padded:
        lengths = torch.tensor([len(row) for row in rows], device=input_ids.device)
        steps = torch.arange(longest, device=input_ids.device)
        passes[0]["attention_mask"] = (steps[None] < lengths[:, None]).long()
    order = list(chain.from_iterable(by_length.values()))
    row_of_run, run_lengths = torch.unique_consecutive(row_of_target, return_counts=True)
    # A row begins at position 0, so the place of a target in it is the position that predicts it.
    runs = batch.layout.position_ids[batch.layout.logit_index].split(run_lengths.tolist())

    def select(outputs: Hidden) -> torch.Tensor:
        of_row = dict(zip(order, chain.from_iterable(outputs), strict=True))
        return torch.cat([of_row[row].index_select(0, run) for row, run in zip(row_of_run.tolist(), runs, strict=True)])

    return passes, select


def separate_rows(batch: MicroBatch) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return the row of each path of each response, after its prompt, and for each target its row, [N].

    A target that several rows predict is taken from the first of them, once.
    """
    rows: list[torch.Tensor] = []
    row_of_target: list[torch.Tensor] = []
    prefix = batch.token_ids[: batch.layout.prefix_length]
    for group in batch.layout.groups:
        prompt = torch.cat([prefix, batch.token_ids[group.prompt.start : group.prompt.end]])
        segments = iter(batch.token_ids[group.prompt.end : group.end].split(group.segment_lengths))
        for tree in group.trees:
            tokens = [next(segments) for _ in tree.lengths]
            row_of_segment = [len(rows)] * len(tokens)
            for number, path in reversed(list(enumerate(tree.paths(), len(rows)))):
                for segment in path:
                    row_of_segment[segment] = number
            row_of_place = torch.tensor(row_of_segment).repeat_interleave(torch.tensor(tree.lengths))
            of_prompt = torch.tensor([len(rows)])
            row_of_target.append(torch.cat([row_of_place, of_prompt])[tree.predictors])  # -1 is the prompt's
            rows += [torch.cat([prompt, *(tokens[segment] for segment in path)]) for path in tree.paths()]
    return rows, torch.cat(row_of_target)
