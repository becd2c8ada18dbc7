"""The policy (and the frozen reference) as transformers models, and their log-probabilities on a packed micro-batch."""

import copy
from pathlib import Path
from typing import Any

import torch

from services.trainer import bundled
from services.trainer.attention import no_mask, packed_attention, plan_attention
from services.trainer.batch import MicroBatch
from services.trainer.logprobs import TargetLogprobs

ATTENTION_NAME = "onbeat_shared_prompt"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json")


def resolve_model(path: str, cache_dir: Path) -> str:
    """`bundled:NAME` becomes its cached folder; a folder or a hub id stays. Raises ValueError."""
    if path.startswith("bundled:"):
        return str(bundled.prepare(path.removeprefix("bundled:"), cache_dir))
    return path


def load_model(source: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A decoder that attends by packed layouts, with parameters in the compute dtype. Raises ValueError by name."""
    from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"model {source!r} cannot be loaded: {error}") from error
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
    model.set_attn_implementation(ATTENTION_NAME)
    model.config.use_cache = False
    return model.to(device).eval()


def freeze_copy(model: Any) -> Any:
    """The reference policy: same sharding and dtype, no gradient."""
    return copy.deepcopy(model).requires_grad_(False)


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


def response_logprobs(model: Any, batch: MicroBatch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every response token under the tempered policy, and the entropy there (no gradient).

    Both [N] float32 (float64 for a float64 model). Logits exist only where a response token is predicted.
    """
    inputs = {
        "input_ids": batch.token_ids[None],
        "position_ids": batch.layout.position_ids[None],
        "layout_plan": plan_attention(batch.layout, next(model.parameters()).dtype),
        "use_cache": False,
    }
    if has_plain_head(model):
        hidden = model.get_decoder()(**inputs).last_hidden_state[0].index_select(0, batch.layout.logit_index)
        return TargetLogprobs.apply(hidden, model.get_output_embeddings().weight, batch.target_ids, temperature)
    logits = model(**inputs, logits_to_keep=batch.layout.logit_index).logits[0]
    log_probabilities = (logits.float() / temperature).log_softmax(-1)
    with torch.no_grad():
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return log_probabilities.gather(-1, batch.target_ids[:, None])[:, 0], entropy


def has_plain_head(model: Any) -> bool:
    """Whether the logits are just hidden states times a matrix: no bias, no soft cap, no scale."""
    head = model.get_output_embeddings()
    twists = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    is_linear = isinstance(head, torch.nn.Linear) and head.bias is None
    return is_linear and not any(getattr(model.config, name, None) for name in twists)
