"""The policy and its frozen relatives as transformers models, and their log-probabilities on a packed micro-batch."""

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from services.trainer import bundled
from services.trainer.attention import no_mask, packed_attention, plan_attention
from services.trainer.batch import MicroBatch
from services.trainer.logprobs import TargetLogprobs
from services.trainer.lora import adapted_layers, published_tensors, without_adapters
from services.trainer.sharding import call

PACKED_ATTENTION = "onbeat_shared_prompt"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")


def resolve_model(path: str, cache_dir: Path) -> str:
    """`bundled:NAME` becomes its cached folder; a folder or a hub id stays. Raises ValueError."""
    if path.startswith("bundled:"):
        return str(bundled.prepare(path.removeprefix("bundled:"), cache_dir))
    return path


@dataclass(frozen=True)
class Passes:
    """How a model of some architecture goes over a micro-batch; `trial.py` finds out which way is right for it."""

    attention: str = PACKED_ATTENTION  # or transformers' own, `sdpa` or `eager`: then each response is a row of its own
    is_padded: bool = True  # rows are padded to one length, in one pass; otherwise each length has its own pass
    has_plain_head: bool = True  # the logits are just hidden states times a matrix: no bias, no cap, no scale

    @property
    def is_packed(self) -> bool:
        return self.attention == PACKED_ATTENTION

    @property
    def is_one(self) -> bool:
        return self.is_packed or self.is_padded


def load_config(source: str) -> Any:
    """The model's configuration. Raises ValueError by name."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, StrictDataclassError, ValueError) as error:
        raise ValueError(f"model {source!r} cannot be loaded: {error}") from error


def load_model(source: str, dtype: torch.dtype, device: torch.device, passes: Passes = Passes()) -> Any:
    """A decoder for those passes, with parameters in the compute dtype. Raises ValueError by name.

    It is built with its attention, not switched to it: some classes choose theirs when they are built.
    """
    from transformers import AutoModelForCausalLM

    register_attention()
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=passes.attention)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {source!r} cannot be loaded: {error}") from error
    return set_up(model, passes, device)


def set_up(model: Any, passes: Passes, device: torch.device) -> Any:
    """Prepare a transformers model that was built with the attention of these passes: its device, no dropout."""
    model.passes = passes
    model.config.use_cache = False
    return model.to(device).eval()


def register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, no_mask)


def use_attention(model: Any, name: str) -> None:
    """Switch a built model, of a class that bears it, to other passes: PACKED_ATTENTION, or padded rows with `sdpa` or
    `eager`. Jobs never switch; tests and benchmarks compare."""
    model.set_attn_implementation(name)
    model.passes = replace(getattr(model, "passes", Passes()), attention=name)


def enable_gradient_checkpointing(model: Any) -> None:
    """Keep only each decoder layer's input for the backward pass, which computes the rest again.

    The layers' `forward` is wrapped, not transformers' own switch turned on: that one works in training mode only, and
    would turn dropout on, which a policy gradient must not have. Call it before adding hooks or sharding.
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


def freeze_copy(model: Any) -> Any:
    """A policy that stays as it is: same sharding and dtype, no gradient."""
    return copy.deepcopy(model).requires_grad_(False)


def frozen_base(model: Any) -> Any:
    """`freeze_copy` of the model without its adapters: what published weights can be loaded into."""
    frozen = freeze_copy(model)
    for name, layer in adapted_layers(frozen).items():
        frozen.set_submodule(name, layer.get_base_layer())
    return frozen


@torch.no_grad()
def load_frozen(frozen: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Overwrite a frozen copy with published tensors: [shape of the own one] by name, each once.

    Raises ValueError naming what is missing, unknown or of another shape; the copy is then not to be used.
    """
    own = dict(published_tensors(frozen))
    missing = set(own)
    for name, tensor in tensors:
        if name not in own or own[name].shape != tensor.shape:
            known = tuple(own[name].shape) if name in own else "no such parameter"
            raise ValueError(f"weights of another model: {name} {tuple(tensor.shape)}, the model has {known}")
        own[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise ValueError(f"weights of another model: nothing for {', '.join(sorted(missing))}")


def model_files(source: str) -> dict[str, bytes]:
    """Config and tokenizer files, by name: what a rollout needs besides weights."""
    import tempfile

    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.from_pretrained(source).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        if (Path(source) / "generation_config.json").is_file():
            GenerationConfig.from_pretrained(source).save_pretrained(folder)
        files = sorted(path for path in Path(folder).iterdir() if path.is_file())
        return {path.name: path.read_bytes() for path in files if not path.name.endswith(WEIGHT_FILES)}


def tri_model_logprobs(
    policy: Any, old: Any | None, reference: Any | None, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(trainer_logprobs, entropy, old_logprobs, ref_logprobs), all [N]; only the first carries a gradient.

    One micro-batch, packed and planned once, through up to three models. None skips a model; `reference` may be the
    policy itself, which then stands for itself without its adapters. The frozen ones go first: what they allocate is
    free again before the policy keeps its activations.
    """
    prepared = prepare_inputs(policy, batch)
    with torch.no_grad():
        old_logprobs = None if old is None else target_logprobs(old, prepared, batch, temperature)[0]
        ref_logprobs = None
        if reference is not None:
            with without_adapters(policy) if reference is policy else nullcontext():
                ref_logprobs = target_logprobs(reference, prepared, batch, temperature)[0]
    trainer_logprobs, entropy = target_logprobs(policy, prepared, batch, temperature)
    return trainer_logprobs, entropy, old_logprobs, ref_logprobs


def response_logprobs(model: Any, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every response token under the tempered policy, and the entropy there (no gradient).

    Both [N] float32 (float64 for a float64 model).
    """
    return target_logprobs(model, prepare_inputs(model, batch), batch, temperature)


Hidden = list[torch.Tensor]  # of each pass, [rows, T, ...]
Prepared = tuple[list[dict[str, Any]], Callable[[Hidden], torch.Tensor]]  # inputs; what predicts a target, [N, ...]


def target_logprobs(
    model: Any, prepared: Prepared, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `response_logprobs`, on inputs at hand. Logits exist only where a response token is predicted."""
    return call(whole_model_logprobs, model, prepared, batch, temperature)


def whole_model_logprobs(
    model: Any, prepared: Prepared, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The computation itself, where the head's weight is at hand (`sharding.call`)."""
    passes, select = prepared
    if model.passes.has_plain_head:
        decoder = model.get_decoder()
        hidden = select([decoder(**inputs).last_hidden_state for inputs in passes])
        return TargetLogprobs.apply(hidden, model.get_output_embeddings().weight, batch.target_ids, temperature)
    logits = select([model(**inputs).logits for inputs in passes])
    log_probabilities = (logits.float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return log_probabilities.gather(-1, batch.target_ids[:, None])[:, 0], entropy


def prepare_inputs(model: Any, batch: MicroBatch) -> Prepared:
    """What depends on the micro-batch only, for every model of this architecture, dtype and attention."""
    return packed_inputs(batch) if model.passes.is_packed else separate_inputs(batch, model.passes.is_padded)


def packed_inputs(batch: MicroBatch) -> Prepared:
    """One row with each prompt once."""
    inputs = {
        "input_ids": batch.token_ids[None],
        "position_ids": batch.layout.position_ids[None],
        "layout_plan": plan_attention(batch.layout),
        "use_cache": False,
    }
    return [inputs], lambda outputs: outputs[0][0].index_select(0, batch.layout.logit_index)


def separate_inputs(batch: MicroBatch, is_padded: bool) -> Prepared:
    """A row per response, its prompt repeated: for attentions that cannot be packed. One pass of padded rows, or one
    for each length."""
    rows, spans = separate_rows(batch)
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

    def select(outputs: Hidden) -> torch.Tensor:
        of_row = dict(zip(order, chain.from_iterable(outputs), strict=True))
        return torch.cat([of_row[index][start:end] for index, (start, end) in enumerate(spans)])

    return passes, select


def separate_rows(batch: MicroBatch) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """Prompt and response of each response, and which of these places predict the response's tokens."""
    rows, spans = [], []
    prefix = batch.token_ids[: batch.layout.prefix_length]
    for group in batch.layout.groups:
        prompt = torch.cat([prefix, batch.token_ids[group.start : group.start + group.prompt_length]])
        for start, length in zip(group.response_starts, group.response_lengths, strict=True):
            rows.append(torch.cat([prompt, batch.token_ids[start : start + length]]))
            spans.append((len(prompt) - 1, len(prompt) + length))
    return rows, spans
