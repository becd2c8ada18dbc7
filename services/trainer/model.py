"""The policy and its frozen relatives as transformers models, and their log-probabilities on a packed micro-batch."""

import copy
import functools
from collections.abc import Callable, Iterable
from contextlib import nullcontext
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


def load_model(source: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A decoder that attends by packed layouts, with parameters in the compute dtype. Raises ValueError by name."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {source!r} cannot be loaded: {error}") from error
    register_attention()
    use_attention(model, PACKED_ATTENTION)
    model.config.use_cache = False
    return model.to(device).eval()


def register_attention() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, no_mask)


def use_attention(model: Any, name: str) -> None:
    """PACKED_ATTENTION, or one of transformers' own (`sdpa`, `eager`): then each response is a row of its own."""
    model.set_attn_implementation(name)
    model.is_packed = name == PACKED_ATTENTION


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


def frozen_like(model: Any) -> Any:
    """`freeze_copy` of what is published: a model without adapters, merged if this one has any."""
    frozen = freeze_copy(model)
    for name, layer in adapted_layers(frozen).items():
        frozen.set_submodule(name, layer.get_base_layer())
    load_frozen(frozen, published_tensors(model))
    return frozen


@torch.no_grad()
def load_frozen(frozen: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Overwrite a frozen copy with published weights: [shape of the parameter] by name, each parameter once.

    Raises ValueError naming what is missing, unknown or of another shape; the copy is then not to be used.
    """
    parameters = dict(frozen.named_parameters())
    missing = set(parameters)
    for name, tensor in tensors:
        if name not in parameters or parameters[name].shape != tensor.shape:
            known = tuple(parameters[name].shape) if name in parameters else "no such parameter"
            raise ValueError(f"weights of another model: {name} {tuple(tensor.shape)}, the model has {known}")
        parameters[name].copy_(tensor)
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


Select = Callable[[torch.Tensor], torch.Tensor]  # outputs of all places -> those that predict a target, [N, ...]
Prepared = tuple[dict[str, Any], Select]


def target_logprobs(
    model: Any, prepared: Prepared, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `response_logprobs`, on inputs at hand. Logits exist only where a response token is predicted."""
    return call(whole_model_logprobs, model, prepared, batch, temperature)


def whole_model_logprobs(
    model: Any, prepared: Prepared, batch: MicroBatch, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The computation itself, where the head's weight is at hand (`sharding.call`)."""
    inputs, select = prepared
    if has_plain_head(model):
        hidden = select(model.get_decoder()(**inputs).last_hidden_state)
        return TargetLogprobs.apply(hidden, model.get_output_embeddings().weight, batch.target_ids, temperature)
    log_probabilities = (select(model(**inputs).logits).float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return log_probabilities.gather(-1, batch.target_ids[:, None])[:, 0], entropy


def prepare_inputs(model: Any, batch: MicroBatch) -> Prepared:
    """What depends on the micro-batch only, for every model of this architecture, dtype and attention."""
    return packed_inputs(batch) if model.is_packed else separate_inputs(batch)


def packed_inputs(batch: MicroBatch) -> Prepared:
    """One row with each prompt once."""
    inputs = {
        "input_ids": batch.token_ids[None],
        "position_ids": batch.layout.position_ids[None],
        "layout_plan": plan_attention(batch.layout),
        "use_cache": False,
    }
    return inputs, lambda outputs: outputs[0].index_select(0, batch.layout.logit_index)


def separate_inputs(batch: MicroBatch) -> Prepared:
    """A padded row per response, its prompt repeated: for attentions that cannot be packed."""
    rows, places = [], []
    prefix = batch.token_ids[: batch.layout.prefix_length]
    for group in batch.layout.groups:
        prompt = torch.cat([prefix, batch.token_ids[group.start : group.start + group.prompt_length]])
        for start, length in zip(group.response_starts, group.response_lengths, strict=True):
            rows.append(torch.cat([prompt, batch.token_ids[start : start + length]]))
            places.append((len(prompt) - 1, len(prompt) + length))
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=input_ids.device)
    attention_mask = (torch.arange(input_ids.shape[1], device=input_ids.device)[None] < lengths[:, None]).long()
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    return inputs, lambda outputs: torch.cat([row[a:b] for row, (a, b) in zip(outputs, places, strict=True)])


def has_plain_head(model: Any) -> bool:
    """Whether the logits are just hidden states times a matrix: no bias, no soft cap, no scale."""
    head = model.get_output_embeddings()
    twists = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    is_linear = isinstance(head, torch.nn.Linear) and head.bias is None
    return is_linear and not any(getattr(model.config, name, None) for name in twists)
